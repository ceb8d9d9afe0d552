"""Access control lists in Confluent's v3 dialect, of a cluster that has none: switched off.

The answer is that of a cluster without an authorizer, which clients know; nobody takes an empty
list for "nothing is allowed", or a 404 for another version of the API.
"""

from fastapi import APIRouter, Depends

from service.admin_v3 import known_cluster
from service.topics import ERRORS
from storage.errors import InvalidRequest

router = APIRouter(
    prefix="/clusters/{cluster_id}",
    tags=["v3 cluster"],
    dependencies=[Depends(known_cluster)],
    responses=ERRORS,
)


async def _switched_off() -> None:
    """400/40002: there is no authorizer, everybody may do everything."""
    raise InvalidRequest("SecurityDisabledException: No Authorizer is configured on the broker.")


for method, path, name in (
    ("GET", "/acls", "list_acls"),
    ("POST", "/acls", "create_acl"),
    ("DELETE", "/acls", "delete_acls"),
    ("POST", "/acls:batch", "create_acls"),
):
    router.add_api_route(path, _switched_off, methods=[method], name=name)
