// Every question with the AI SDK; what came of each goes to standard output as JSON. Arguments: API, address of the
// server.

import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const [api, url] = process.argv.slice(2);
const settings = { name: "tercet", baseURL: `${url}/v1`, apiKey: "-", supportsStructuredOutputs: true };
const model = {
  compatible: () => createOpenAICompatible(settings)("tgi"),
  chat: () => createOpenAI(settings).chat("tgi"),
  responses: () => createOpenAI(settings).responses("tgi"),
  messages: () => createAnthropic(settings)("tgi"),
}[api]();
const base = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const hello = "Hello! What is 2 plus 3?";
const person = z.object({ name: z.string(), age: z.number() });

async function tools() {
  const places = [];
  const execute = async ({ location }) => {
    places.push(location);
    return "18 degrees, sunny";
  };
  const weather = tool({
    description: "Get the current weather",
    inputSchema: z.object({ location: z.string() }),
    execute,
  });
  const answer = await generateText({
    ...base, prompt: "What is the weather in Paris?", tools: { get_weather: weather }, stopWhen: stepCountIs(2),
  });
  return { places, reasons: answer.steps.map((step) => step.finishReason) };
}

async function streamed(prompt) {
  const parts = [];
  const answer = streamText({ ...base, prompt, onError: () => {} });
  for await (const part of answer.fullStream) {
    if (part.type === "text-delta") parts.push(part.text);
    if (part.type === "error") throw part.error;
  }
  return { parts, reason: await answer.finishReason };
}

const questions = {
  text: async () => {
    const answer = await generateText({ ...base, prompt: hello });
    return { text: answer.text, reason: answer.finishReason, tokens: answer.usage.outputTokens };
  },
  stream: () => streamed(hello),
  object: async () => {
    const prompt = "Give me a JSON object with name and age for Anna, 30.";
    return (await generateText({ ...base, output: Output.object({ schema: person }), prompt })).output;
  },
  tools,
  "too long": async () => (await generateText({ ...base, prompt: "Hello ".repeat(6000) })).text,
  "too long streamed": () => streamed("Hello ".repeat(6000)),
};

const outcomes = {};
for (const [name, ask] of Object.entries(questions)) {
  try {
    outcomes[name] = await ask();
  } catch (error) {
    if (!APICallError.isInstance(error)) throw error;
    outcomes[name] = { refused: error.message, status: error.statusCode, retryable: error.isRetryable };
  }
}
process.stdout.write(JSON.stringify(outcomes));
