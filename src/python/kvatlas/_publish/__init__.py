"""The publisher without I/O: numbers, batches, and what is kept of them for daemons that miss some."""
