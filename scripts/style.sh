#!/usr/bin/env bash
# Checks of style: ruff and mypy with the settings in pyproject.toml find nothing, shell scripts parse, and the site's pages
# link to what is there. Then figures: code lines by part, and what a reader of a recovery has to follow (10 s).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
status=0
"$python" -m ruff check --output-format concise megatron_recycle scripts tests setup.py || status=1
"$python" -m mypy || status=1
"$python" -m mypy --explicit-package-bases tests/fakes || status=1
for script in .ci/run $(find scripts -name '*.sh' -o -name '*.sbatch'); do
    bash -n "$script" || status=1
done
site=$(mktemp -d)
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --quiet --site-dir "$site" || status=1
rm -rf "$site"
"$python" scripts/count.py || status=1
exit "$status"
