"""Make the bucket of `TIDELOG_STORE` where there is none: what docker-compose.yml starts first.

Waits for the S3 server to answer, because compose starts both at once.
"""

import os
import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

TRIES = 60
THERE = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


def main() -> int:
    bucket = urlsplit(os.environ["TIDELOG_STORE"]).netloc
    client = boto3.client(
        "s3",
        endpoint_url=os.environ["TIDELOG_S3_ENDPOINT"],
        region_name=os.environ["TIDELOG_S3_REGION"],
        config=Config(
            s3={"addressing_style": "path"}, connect_timeout=2, retries={"total_max_attempts": 1}
        ),
    )
    why = ""
    for _ in range(TRIES):
        try:
            client.create_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] in THERE:
                return 0
            why = str(error)
        except BotoCoreError as error:
            why = str(error)
        else:
            return 0
        time.sleep(1)
    sys.stderr.write(f"bucket {bucket} cannot be made: {why}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
