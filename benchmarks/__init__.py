"""How fast the linears are, beside F.linear and beside what the machine can do: ``python -m benchmarks``.

==================  ================================================================
`timing`            several functions timed in turn, medians and quartiles
`limits`            the machine's limits: arithmetic peaks, read bandwidth
`weights`           copies of a weight in an arena far larger than the caches
`cases`             what is measured: linears, odd shapes, the cost of a call; or experts
`models`            whole models beside transformers and llama.cpp
`report`            text tables and what stands out
`picture`           the roofline, bars of models
==================  ================================================================
"""
