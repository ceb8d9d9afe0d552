// The login page, shown where the broker's security is on; and the logout.
//
// The console sends the key to the broker once and does not store it. From then on, the browser has
// a cookie that no script can read.

import { html, useState } from "./vendor/htm-preact.js";
import { request, send } from "./api.js";
import { Field, Problem } from "./parts.js";

export function Login({ onDone }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const act = async (event) => {
    event.preventDefault();
    if (!key || busy) return;
    setBusy(true);
    try {
      onDone(await send("POST", "tidelog/v1/login", { key: key.trim() }));
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<main id="main" class="login" data-place="login">
    <form class="card" onSubmit=${act} aria-label="Log in">
      <div class="card-body">
        <h1><img src="icon.svg" alt="" width="26" height="26" /> tidelog</h1>
        <p class="muted">This broker requires an API key: yours, or the administrator's.</p>
        <${Field} label="Key">
          <input type="password" name="key" autocomplete="current-password" spellcheck=${false} autofocus
            value=${key} onInput=${(e) => setKey(e.target.value)} /><//>
        ${error && html`<${Problem} error=${error.status === 401 ? { message: "Invalid or expired key." } : error} />`}
        <button type="submit" class="primary" disabled=${!key || busy}>${busy ? "Working…" : "Log in"}</button>
      </div>
    </form>
  </main>`;
}

export async function logOut() {
  await request("POST", "tidelog/v1/logout");
  window.dispatchEvent(new Event("tidelog-login"));
}
