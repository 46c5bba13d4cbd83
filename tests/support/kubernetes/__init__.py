"""A miniature of Kubernetes on this machine: rendered objects run as real processes, without Docker or a cluster.

`controllers.py`, `job_controller.py` and `probes.py` decide, as pure functions, what the stock controllers and the
kubelet decide. `pod_spec.py` reads a pod's template. `sandbox.py`, `kubelet.py`, `services.py` and `cluster.py` do it:
each pod is a host of `tests/support/hosts` (network, host name, process numbers, `/etc/hosts`), and its container is
process 1 of numbers of its own, in a root directory of its own.

What is real: processes, signals, exit codes, process 1, networks, host names, the user and the group, a root that
cannot be written, no capabilities, secrets as files with their rights, claims and empty directories.

What is not: images (this checkout and its interpreter stand in for them), limits of memory and CPU, disruption budgets
and network policies (nobody keeps them), the scheduler (nodes take turns), DNS (a service's name stands in
`/etc/hosts`), seccomp. A service is a TCP proxy: it refuses where no pod is ready, and what is connected stays
connected. Pods have one container. Pauses of back-off, and the time until a lost node's pods are given up, are those of
Kubernetes times `pace`.
"""
