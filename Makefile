# SPDX-License-Identifier: Apache-2.0
# make demo [BAG=folder]   play a simulated drive, or a recording, into the node
# make test                all tests but the slow ones and those that need a card
# make test-slow           the slow ones
# make bench               time the stages beside their peers
# make setup               only .venv, which each of these makes ready first
# make clean               remove everything that these commands have made in this folder
# make lock                write requirements/constraints.txt anew
# ARGS=... is handed on, for example make test ARGS='-k voxel'.

RUN = . .venv/env.sh && exec

.PHONY: demo test test-slow bench setup clean lock

demo: setup
	@$(RUN) tt_perception demo $(if $(BAG),--bag "$(BAG)") $(ARGS)

test: setup
	@$(RUN) python -m pytest -m 'not slow' $(ARGS)

test-slow: setup
	@$(RUN) python -m pytest -m slow $(ARGS)

bench: setup
	@$(RUN) tt_perception bench host $(ARGS)
	@$(RUN) tt_perception bench cpu $(ARGS)

setup:
	@sh tools/bootstrap.sh

clean:
	rm -rf .venv out build dist install log *.egg-info .pytest_cache .ruff_cache .hypothesis

# Pins every package below the direct ones, for all Pythons; certificates stay current instead.
lock: setup
	@$(RUN) uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate \
	  --no-emit-package certifi $(ARGS) $(addprefix requirements/,run.txt tt.txt ros.txt build.txt test.txt \
	  installer.txt) --output-file requirements/constraints.txt
	@sed -i '1i # SPDX-License-Identifier: Apache-2.0\n# Written by: make lock' \
	  requirements/constraints.txt
