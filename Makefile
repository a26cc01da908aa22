# Every target is a small script in scripts/, which can be called directly with arguments.
.DEFAULT_GOAL := help
.PHONY: help train test check bench demo-offload docs clean

help:   ## show this
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+): *## */  make \1\t/'

train:  ## train a small GPT on two ranks at stage 2, and compare with one process
	@scripts/train

test:   ## run all tests
	@scripts/test

check:  ## format, lint, types, layers, size budgets, public names
	@scripts/check

bench:  ## step time against DistributedDataParallel
	@scripts/bench

demo-offload: ## train five times what the accelerator may hold, and compare the bits
	@scripts/demo-offload

docs:   ## build the documentation into out/docs
	@scripts/docs

clean:  ## remove everything that the other targets made, .venv included
	@scripts/clean
