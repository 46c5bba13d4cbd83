"""Only the file that ms-swift imports: it puts this directory on ``sys.path``, where other names would be found too."""
