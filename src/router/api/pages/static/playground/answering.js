// One answer of a chat: streamed from /v1/chat/completions into a message of the chat.

import { events } from "./api.js";

/** An answer that is coming. `message` grows; `onChange` is called after each piece. */
export class Run {
  #abort = new AbortController();
  #began = performance.now();
  #firstAt = null;
  #pieces = 0;
  #before;

  /** `before`: how long the message's texts were, where the answer continues it. */
  constructor(chat, message, onChange) {
    this.chat = chat;
    this.message = message;
    this.onChange = onChange;
    this.#before = message.figures?.tokens ?? 0;
    this.isForgotten = false;
  }

  get wasStopped() {
    return this.#abort.signal.aborted;
  }

  stop() {
    this.#abort.abort();
  }

  /** Returns when the answer is complete. Throws Problem, or AbortError after `stop`. */
  async go(path, body, key) {
    this.message.finish = "running";
    try {
      for await (const chunk of events(path, body, { key, signal: this.#abort.signal, isLast: () => false })) {
        this.#take(chunk);
        this.onChange();
      }
      if (this.message.finish === "running") this.message.finish = "stop";
    } catch (error) {
      this.message.finish = this.wasStopped ? "stopped" : "failed";
      throw error;
    } finally {
      this.message.tool_calls = this.message.tool_calls?.filter(Boolean);
      if (!this.message.tool_calls?.length) delete this.message.tool_calls;
    }
  }

  /** Adds what a chunk brings. Parts of a tool call come by its index, each text of them in pieces. */
  #take({ choices = [], usage }) {
    for (const { delta, finish_reason: reason } of choices) {
      const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
      if (delta.content || reasoning || delta.tool_calls) {
        this.#firstAt ??= performance.now();
        this.#pieces += 1;
      }
      if (reasoning) {
        this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
        this.message.thought_ms = performance.now() - this.#began;
      }
      this.message.content += delta.content ?? "";
      this.message.finish = reason ?? this.message.finish;
      for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    }
    this.message.figures = this.#figures(usage);
  }

  #takeCall({ index, id, function: called }) {
    const calls = (this.message.tool_calls ??= []);
    const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id += id ?? "";
    call.function.name += called?.name ?? "";
    call.function.arguments += called?.arguments ?? "";
  }

  /** How many tokens, how fast after the first, how long until the first. */
  #figures(usage) {
    const now = performance.now();
    const tokens = usage?.completion_tokens ?? this.#pieces;
    const seconds = (now - (this.#firstAt ?? now)) / 1000;
    return {
      tokens: this.#before + tokens,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      first_ms: (this.#firstAt ?? now) - this.#began,
      prompt: usage?.prompt_tokens ?? this.message.figures?.prompt ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
      context: usage?.total_tokens ?? this.message.figures?.context ?? null,
    };
  }
}
