// The page that asks for a key, where the broker's security is on; and the end of a session.
//
// The key goes to the broker once and is nowhere kept here: what the browser holds from then on is a
// cookie that no script can read.

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
        <p class="muted">This broker asks for a key: the one that you were given, or that of the administrator.</p>
        <${Field} label="Key">
          <input type="password" name="key" autocomplete="current-password" spellcheck=${false} autofocus
            value=${key} onInput=${(e) => setKey(e.target.value)} /><//>
        ${error && html`<${Problem} error=${error.status === 401 ? { message: "No key has this secret, or it has expired." } : error} />`}
        <button type="submit" class="primary" disabled=${!key || busy}>${busy ? "Working…" : "Log in"}</button>
      </div>
    </form>
  </main>`;
}

export async function logOut() {
  await request("POST", "tidelog/v1/logout");
  window.dispatchEvent(new Event("tidelog-login"));
}
