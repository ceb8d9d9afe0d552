#!/bin/sh
# Run `tidelog compact` as a Spark job: the driver plans and commits, executors read and write segments.
#
#   TIDELOG_STORE=s3://bucket/prefix SPARK_MASTER=yarn spark-compact.sh [TOPIC]... [OPTION]...
#
# The options are those of `tidelog compact`; without --dry-run the job changes the tables.
# SPARK_OPTIONS has options of spark-submit (`--conf spark.executor.memory=4g`), SPARK_SUBMIT its path.
# Driver and executors run the interpreter PYSPARK_PYTHON, which must have tidelog[spark]. If executors
# have no such interpreter, send them a packed environment with `--archives` of spark-submit. The job
# needs no jar.
#
# The job may be killed at any moment and run again; two runs at once are safe. The exit status is that
# of `tidelog compact`.
set -eu

if [ -z "${TIDELOG_STORE:-}" ]; then
    echo "spark-compact: set TIDELOG_STORE to the location of the log: s3://bucket/prefix" >&2
    exit 2
fi
submit=${SPARK_SUBMIT:-$(command -v spark-submit || true)}
if [ -z "$submit" ]; then
    echo "spark-compact: no spark-submit on the PATH: install tidelog[spark], or set SPARK_SUBMIT" >&2
    exit 1
fi
jobs=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086  # SPARK_OPTIONS is a list of words
exec "$submit" ${SPARK_MASTER:+--master "$SPARK_MASTER"} --name tidelog-compact \
    --conf spark.log.level=ERROR --conf spark.ui.showConsoleProgress=false ${SPARK_OPTIONS:-} \
    "$jobs/spark_command.py" compact --engine spark --yes "$@"
