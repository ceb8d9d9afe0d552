"""Create the bucket of `TIDELOG_STORE` if it does not exist; docker-compose.yml starts this first.

Compose starts the S3 server at the same time, so this retries once a second for a minute.
"""

import os
import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

CREATE_TRIES = 60
CODES_OF_EXISTING = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


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
    failure = ""
    for _ in range(CREATE_TRIES):
        try:
            client.create_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] in CODES_OF_EXISTING:
                return 0
            failure = str(error)
        except BotoCoreError as error:
            failure = str(error)
        else:
            return 0
        time.sleep(1)
    sys.stderr.write(f"cannot create bucket {bucket}: {failure}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
