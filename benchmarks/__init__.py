"""How fast the linears are, beside F.linear and beside what the machine can do: ``python -m benchmarks``.

==================  ================================================================
`ktlinear.bench`    what is measured, and how
`models`            whole models beside transformers and llama.cpp
`types`             each weight type's size, speed and perplexity
`report`            text tables and what stands out
`picture`           the roofline, bars of models
==================  ================================================================
"""
