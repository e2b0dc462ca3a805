// A client on npm `@modelcontextprotocol/sdk` 1.x in its default mode. ../README.md describes the
// scenarios and what is printed.
import { readFileSync } from "node:fs";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const scenarios = {
  async list() {
    const { client, close } = await connect();
    const tools = await toolNames(client);
    await close();
    return { tools };
  },

  async basics({ calls = [] }) {
    const { client, transport, http, close } = await connect();
    const tools = await toolNames(client);
    const results = [];
    for (const call of calls) results.push(await outcome(client, call));
    const ping = await client.ping().then(() => true, (error) => error.message);
    const findings = {
      serverInfo: client.getServerVersion(),
      protocolVersion: transport.protocolVersion,
      tools,
      results,
      ping,
    };
    await close();
    return { ...findings, http };
  },

  async parallel({ calls = [] }) {
    const { client, http, close } = await connect();
    const results = await Promise.all(calls.map((call) => outcome(client, call)));
    await close();
    return { results, http };
  },

  async progress({ call }) {
    const { client, http, close } = await connect();
    const progress = [];
    const results = [await outcome(client, call, { onprogress: (step) => progress.push(step) })];
    await close();
    return { progress, results, http };
  },

  async cancel({ call }) {
    const { client, http, close } = await connect();
    const abort = new AbortController();
    const options = { signal: abort.signal, onprogress: () => abort.abort("changed my mind") };
    const results = [await outcome(client, call, options)];
    const ping = await client.ping().then(() => true, (error) => error.message);
    await close();
    return { results, ping, http };
  },

  async silent({ call, seconds }) {
    const { client, http, close } = await connect();
    const results = [await outcome(client, call, { timeout: seconds * 1000 })];
    await close();
    return { results, http };
  },

  async large({ call }) {
    const { client, http, close } = await connect();
    const { content } = await client.callTool(call);
    const characters = content.map((block) => block.text.length);
    const ping = await client.ping().then(() => true, (error) => error.message);
    await close();
    return { characters, ping, http };
  },
};

/** Connects in the SDK's default mode. The fetch only notes what passed; it changes nothing. */
async function connect() {
  const http = [];
  const transport = new StreamableHTTPClientTransport(new URL(required("A2MCP_URL")), {
    requestInit: { headers: { Authorization: `Bearer ${required("A2MCP_TOKEN")}` } },
    fetch: async (url, init) => {
      const response = await fetch(url, init);
      http.push([init?.method ?? "GET", methodOf(init?.body), response.status].filter(Boolean).join(" "));
      return response;
    },
  });
  const client = new Client({ name: "a2mcp-test-ts-sdk-v1", version: "1" });
  await client.connect(transport);
  const close = async () => {
    await transport.terminateSession();
    await client.close();
  };
  return { client, transport, http, close };
}

async function toolNames(client) {
  const names = [];
  let cursor;
  do {
    const page = await client.listTools(cursor === undefined ? undefined : { cursor });
    names.push(...page.tools.map((tool) => tool.name));
    cursor = page.nextCursor;
  } while (cursor !== undefined);
  return names;
}

async function outcome(client, { name, arguments: args }, options) {
  try {
    const result = await client.callTool({ name, arguments: args }, undefined, options);
    return { isError: result.isError ?? false, content: result.content.map(withoutData) };
  } catch (error) {
    return { error: { code: error.code ?? null, message: error.message } };
  }
}

function withoutData({ data, ...block }) {
  return data === undefined ? block : { ...block, bytes: Buffer.from(data, "base64").length };
}

/** The JSON-RPC method of a request's body; of a huge one without parsing it. */
function methodOf(body) {
  return typeof body === "string" ? /"method":"([^"]*)"/.exec(body)?.[1] : undefined;
}

function required(name) {
  const value = process.env[name];
  if (!value) throw new Error(`the environment variable ${name} is missing`);
  return value;
}

try {
  const [name, parameters = "{}"] = process.argv.slice(2);
  const scenario = Object.hasOwn(scenarios, name ?? "") ? scenarios[name] : undefined;
  if (!scenario) throw new Error(`usage: client.mjs ${Object.keys(scenarios).join("|")} [PARAMETERS|-]`);
  const findings = await scenario(JSON.parse(parameters === "-" ? readFileSync(0, "utf8") : parameters));
  process.stdout.write(JSON.stringify(findings) + "\n");
} catch (error) {
  process.stderr.write(`${error.stack ?? error}\n${error.cause ? `caused by: ${error.cause}\n` : ""}`);
  process.exitCode = 1;
}
