// Updates the page's content without loading the page again. Without scripts, the browser reloads it regularly.
"use strict";

const live = document.getElementById("live");
const stale = document.getElementById("stale");

// An update must not remove a selection, or text that the visitor is typing.
function inUse() {
  const selection = document.getSelection();
  return (
    document.hidden ||
    document.activeElement.matches("input") ||
    (!selection.isCollapsed && live.contains(selection.anchorNode))
  );
}

function replace(text) {
  const found = new DOMParser().parseFromString(text, "text/html").getElementById("live");
  const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  live.replaceChildren(...found.childNodes);
  if (focused !== null) {
    const again = [...live.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused);
    if (again) again.focus({ preventScroll: true });
  }
  live.dataset.refreshed = Number(live.dataset.refreshed || 0) + 1;
}

function tell(problem) {
  stale.hidden = !problem;
  stale.textContent = problem;
}

async function refresh() {
  if (!inUse()) {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.ok) replace(await answer.text());
      tell(answer.ok ? "" : `This is not up to date: the sidecar answers ${answer.status}.`);
    } catch {
      tell("This is not up to date: the sidecar does not answer.");
    }
  }
  setTimeout(refresh, Number(live.dataset.intervalMs));
}

setTimeout(refresh, Number(live.dataset.intervalMs));
