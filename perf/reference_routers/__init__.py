"""Routers and strategies beside their authors' code: the same files, the same inputs, both answers.

`python -m perf.reference_routers --source PATH [PATH ...]`, each a checkout of one of these repositories:

====================  ================================================================================================
thu-nics/R2R          every class and every strategy of its registry, but the random one
aiming-lab/CITER      the confidence network
clinicalml/co-llm     `generate_response`: deferral, warm-ups, and the tokens of whole responses
Zengwh02/GlimpRouter  `glimprouter`: who writes each step, the steps, and the entropies
====================  ================================================================================================

Their code is imported from there and nothing of it is copied. Networks are built, filled with random weights and saved
by it; our policies load the files that it wrote. Done from outside (`imports`):

* Packages that they import and that are missing here get stand-ins without contents. CITER takes one class from
  torchvision, whose wheel does not load beside a CPU build of torch: `--torchvision FOLDER`, into which
  `pip install --no-deps --target FOLDER torchvision` put it, reads that class without the compiled operators.
* R2R's HiddenStatesTokenClassifierWithLMHead and NeuralMultiInputSwitching raise in their constructors. That one
  statement is left out, what stands behind it runs.
* R2R's MultiClass... have layers and no `forward`; one is added that applies their layers in order.
* GlimpRouter's two HTTP clients, and Co-LLM's two functions that ask servers, answer from made-up models (`world`).

`--vectors FILE` writes small values of R2R's classes and strategies, which a unit test reads.
"""
