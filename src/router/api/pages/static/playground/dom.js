// Elements by function calls. Texts become text nodes: nothing on this page is ever read as HTML.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element. `attributes`: `on...` is a listener, false and null leave one out. `children`: nodes and texts. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Says something to screen readers that others see anyway. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** A paragraph that says in words what went wrong. */
export const problem = (text) => element("p", { class: "problem", role: "alert" }, text);

/** Puts a text on the clipboard, and says on the button whether that worked. */
export async function copy(text, button) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Browsers give the clipboard to pages from https and from this machine only.
    button.textContent = "Not allowed by the browser";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** `update`, at most once for each picture that the screen shows. */
export function oncePerFrame(update) {
  let isPlanned = false;
  return () => {
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(() => { isPlanned = false; update(); });
  };
}
