"""Hosts for tests: network, process, UTS and mount namespaces on this machine, with cables that can be disturbed."""
