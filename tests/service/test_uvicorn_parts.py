"""The parts of uvicorn that are not public, and that the listeners use.

A release of uvicorn may change them. `PARTS` names each. The test reads both sources, so that a
part that is new here, or gone there, is an error that names it.
"""

import ast
import inspect
import textwrap

import pytest
import uvicorn
from uvicorn.protocols.http import flow_control, httptools_impl

from tidelog.service.http import exchange, http_server, uvicorn_protocol

PARTS = {
    (uvicorn_protocol.Protocol, httptools_impl.HttpToolsProtocol): """
        _start_asgi_task access_logger app client config connection_lost connection_made cycle
        data_received eof_received expect_100_continue flow headers logger loop on_body on_header
        on_headers_complete on_message_begin on_message_complete on_response_complete parser
        pipeline scope server_state shutdown transport url
    """,
    (uvicorn_protocol.TlsProtocol, httptools_impl.HttpToolsProtocol): """
        config connection_lost connection_made data_received flow logger loop pause_writing
        resume_writing transport
    """,
    (exchange.Exchange, httptools_impl.RequestResponseCycle): """
        body default_headers disconnected flow keep_alive message_event more_body on_response
        receive response_complete response_started run_asgi scope send transport
        waiting_for_100_continue
    """,
    (exchange.Flow, flow_control.FlowControl): "read_paused resume_reading",
    (uvicorn_protocol.Config, uvicorn.Config): "",
    (http_server.HttpServer, uvicorn.Server): """
        _log_started_message capture_signals config server_state servers should_exit shutdown
        startup
    """,
}


def attributes(source: str) -> tuple[set[str], set[str]]:
    """Return the attributes of `self` and of `super()` in a class: those it sets, those it uses."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value
            is_self = isinstance(owner, ast.Name) and owner.id == "self"
            is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
            if is_self and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif is_self or is_super:
                used.add(node.attr)
    return defined, used


def parts(own: type, base: type) -> set[str]:
    """Return the names of the base class that the class uses or overrides."""
    defined, used = attributes(inspect.getsource(own))
    theirs = attributes(inspect.getsource(base))[0] | set(vars(base))
    return (defined | used) & {name for name in theirs if name != "__init__"}


@pytest.mark.parametrize(("own", "base"), PARTS, ids=lambda kind: kind.__name__)
def test_uvicorn_has_parts_that_are_used(own: type, base: type) -> None:
    assert issubclass(own, base)
    assert parts(own, base) == set(PARTS[own, base].split())


def test_constants_have_their_meaning() -> None:
    assert flow_control.HIGH_WATER_LIMIT == 65536
    assert httptools_impl.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
