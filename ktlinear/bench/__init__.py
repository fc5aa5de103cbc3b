"""Measures linears beside F.linear and the limits: ``python -m ktlinear bench`` and ``python -m benchmarks``.

==================  ================================================================
`timing`            several functions timed in turn, medians and quartiles
`limits`            the machine's limits: arithmetic peaks, read bandwidth
`weights`           copies of a weight in an arena far larger than the caches
`cases`             what is measured: linears, odd shapes, the cost of a call; or experts
`cli`               the command
==================  ================================================================
"""
