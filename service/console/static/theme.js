// Set the theme before the first paint: the system's, or the one chosen in this browser.
"use strict";
(() => {
  const held = localStorage.getItem("tidelog.theme");
  if (held === "light" || held === "dark") document.documentElement.dataset.theme = held;
})();
