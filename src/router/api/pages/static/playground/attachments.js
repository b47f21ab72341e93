// Pictures and text files that go with the next message: by the button, by drag and by paste.

import { byId, element, toast } from "./dom.js";

const LONGEST_SIDE = 1536; // pixels; models scale larger pictures down themselves
const QUALITY = 0.88;
const MOST_TEXT_BYTES = 200_000;

let pictures = [];
let readsPictures = false;
let notify = () => {};

export function setUp(onChange) {
  notify = onChange;
  const input = byId("attach-input");
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    take(input.files);
    input.value = "";
  });
  byId("chat-input").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    take(files);
  });
  const panel = byId("panel-chat");
  panel.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    panel.classList.add("dropping");
  });
  panel.addEventListener("dragleave", (event) => {
    if (!panel.contains(event.relatedTarget)) panel.classList.remove("dropping");
  });
  panel.addEventListener("drop", (event) => {
    panel.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

/** Whether the model reads pictures; text files can always be attached. */
export function allowPictures(isAllowed) {
  readsPictures = isAllowed;
  byId("attach").textContent = isAllowed ? "Attach" : "Attach a text";
  byId("attach-input").accept = isAllowed ? "image/*,text/*,.md,.json,.py,.js,.csv,.log" : "text/*,.md,.json,.py,.js,.csv,.log";
}

/** The pictures that have been attached, as data URLs; they are gone from the composer then. */
export function takePictures() {
  const taken = pictures;
  pictures = [];
  draw();
  return taken;
}

export const attached = () => pictures;

export function giveBack(images) {
  pictures = [...images];
  draw();
}

async function take(files) {
  for (const file of files) {
    try {
      if (file.type.startsWith("image/")) await takePicture(file);
      else await takeText(file);
    } catch (error) {
      toast(`${file.name}: ${error.message}`);
    }
  }
  notify();
}

async function takePicture(file) {
  if (!readsPictures) throw new Error("this model does not read pictures");
  pictures.push(await asDataUrl(file));
  draw();
}

/** The picture, scaled to what models read. */
async function asDataUrl(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("the browser cannot read this picture");
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return file.type === "image/png" && scale === 1 ? canvas.toDataURL("image/png") : canvas.toDataURL("image/jpeg", QUALITY);
}

/** Puts the text of a file into the message. */
async function takeText(file) {
  if (file.size > MOST_TEXT_BYTES) throw new Error("the file is too long for a message");
  const text = await file.text();
  if (text.includes("\0") || text.includes("\uFFFD")) throw new Error("not a text file");
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  const input = byId("chat-input");
  input.value = `${input.value}${input.value ? "\n\n" : ""}${file.name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n`;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

function draw() {
  byId("attachments").replaceChildren(...pictures.map((url, index) => element("span", { class: "attachment" },
    element("img", { src: url, alt: `Attached picture ${index + 1}` }),
    element("button", { type: "button", class: "small", "aria-label": `Remove picture ${index + 1}`, onclick: () => {
      pictures.splice(index, 1);
      draw();
      notify();
    } }, "×"))));
}
