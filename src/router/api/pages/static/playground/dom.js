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

/** Gives a text to the person as a file. */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Says something for some seconds, with a button if there is an `action`, which has a label and a function. */
export function toast(text, action = null) {
  const place = byId("toast");
  clearTimeout(place.timer);
  const close = () => place.replaceChildren();
  place.replaceChildren(element("span", {}, text), ...(action
    ? [element("button", { type: "button", class: "small", onclick: () => { close(); action.run(); } }, action.label)] : []));
  place.timer = setTimeout(close, 10_000);
}

/** `update`, at most once for each picture that the screen shows, and so that it takes a small part of the time. */
export function oncePerFrame(update) {
  let isPlanned = false;
  let rest = 0;
  return () => {
    if (isPlanned) return;
    isPlanned = true;
    setTimeout(() => requestAnimationFrame(() => {
      isPlanned = false;
      const began = performance.now();
      update();
      rest = 4 * (performance.now() - began) - 16;
    }), Math.max(rest, 0));
  };
}
