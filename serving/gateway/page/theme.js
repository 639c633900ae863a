// Dark, light, or as the system has it; remembered in this browser.

import { byId } from "./dom.js";

const CHOICES = ["system", "dark", "light"];
const KEY = "slipstream-theme";

export function setUpTheme() {
  apply(localStorage.getItem(KEY));
  byId("theme").addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % CHOICES.length];
    localStorage.setItem(KEY, next);
    apply(next);
  });
}

function apply(stored) {
  const theme = CHOICES.includes(stored) ? stored : "system";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
