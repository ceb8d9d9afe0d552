// The login page, shown where the broker's security is on; and the logout.
//
// The console sends the key to the broker once and does not store it. From then on, the browser has
// a cookie that no script can read.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { request, send } from "./api.js";
import { Field, Problem } from "./parts.js";

export function Login({ onDone }) {
  return html`<main id="main" class="login" data-place="login"><${LoginForm} onDone=${onDone} title="tidelog"
    note="This broker requires an API key: yours, or the administrator's." /></main>`;
}

/** The login over a page whose session has ended. The page keeps what the user typed. */
export function LoginAgain({ me, onDone }) {
  const held = useRef();
  useLayoutEffect(() => held.current.showModal(), []);
  return html`<dialog ref=${held} class="login-again" aria-label="Your session has ended" onCancel=${(event) => event.preventDefault()}
      onKeyDown=${(event) => event.key === "Escape" && event.preventDefault()}>
    <${LoginForm} onDone=${onDone} title="Your session has ended"
      note=${`Log in again as ${me.principal} to continue: the page keeps what you typed.`} /></dialog>`;
}

function LoginForm({ title, note, onDone }) {
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
  return html`<form class="card" onSubmit=${act} aria-label="Log in">
      <div class="card-body">
        <h1><img src="icon.svg" alt="" width="26" height="26" /> ${title}</h1>
        <p class="muted">${note}</p>
        <${Field} label="Key">
          <input type="password" name="key" autocomplete="current-password" spellcheck=${false} autofocus
            value=${key} onInput=${(e) => setKey(e.target.value)} /><//>
        ${error && html`<${Problem} error=${error.status === 401 ? { message: "Invalid or expired key." } : error} />`}
        <button type="submit" class="primary" disabled=${!key || busy}>${busy ? "Working…" : "Log in"}</button>
      </div>
    </form>`;
}

export async function logOut() {
  await request("POST", "tidelog/v1/logout");
  window.dispatchEvent(new Event("tidelog-logout"));
}
