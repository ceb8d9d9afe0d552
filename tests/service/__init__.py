"""The HTTP surface, in process: requests through httpx.ASGITransport to a broker in memory."""
