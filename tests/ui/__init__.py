"""The console in a real browser: Debian's chromium, headless, driven by Playwright."""
