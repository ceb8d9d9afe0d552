#!/bin/sh
# `tidelog compact` as a Spark job: the driver plans and commits, executors read and write segments.
#
#   TIDELOG_STORE=s3://bucket/prefix SPARK_MASTER=yarn spark-compact.sh [TOPIC]... [OPTION]...
#
# Options are those of `tidelog compact`; without --dry-run it does what it says. SPARK_OPTIONS is
# passed on to spark-submit (`--conf spark.executor.memory=4g`), SPARK_SUBMIT says where that is.
# Driver and executors run PYSPARK_PYTHON, an interpreter that has tidelog[spark] installed; where
# executors have none, hand them a packed environment by spark-submit's --archives. No jar is needed.
#
# May be killed and run again, and run twice at once. Exit status as of `tidelog compact`.
set -eu

if [ -z "${TIDELOG_STORE:-}" ]; then
    echo "spark-compact: TIDELOG_STORE must say where the log lives: s3://bucket/prefix" >&2
    exit 2
fi
submit=${SPARK_SUBMIT:-$(command -v spark-submit || true)}
if [ -z "$submit" ]; then
    echo "spark-compact: no spark-submit on the PATH: install tidelog[spark], or set SPARK_SUBMIT" >&2
    exit 1
fi
jobs=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086  # SPARK_OPTIONS are words
exec "$submit" ${SPARK_MASTER:+--master "$SPARK_MASTER"} --name tidelog-compact \
    --conf spark.log.level=ERROR --conf spark.ui.showConsoleProgress=false ${SPARK_OPTIONS:-} \
    "$jobs/spark_command.py" compact --engine spark --yes "$@"
