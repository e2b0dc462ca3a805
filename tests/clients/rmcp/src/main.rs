//! A client on crates.io `rmcp` 3.11 in its default mode. ../../README.md describes the scenarios and
//! what is printed.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientRequest, JsonObject, PingRequest,
    ProgressNotificationParam, ServerResult,
};
use rmcp::service::{NotificationContext, PeerRequestOptions, RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{ClientHandler, RoleClient, ServiceExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

const SCENARIOS: &str = "list|basics|parallel|progress|cancel|silent|large";

type Client = RunningService<RoleClient, Handler>;

/// Notes progress; the rest is as the SDK does it.
#[derive(Clone)]
struct Handler(mpsc::UnboundedSender<ProgressNotificationParam>);

impl ClientHandler for Handler {
    async fn on_progress(&self, step: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        let _ = self.0.send(step);
    }
}

#[derive(Deserialize)]
struct Parameters {
    #[serde(default)]
    calls: Vec<Call>,
    call: Option<Call>,
}

#[derive(Deserialize)]
struct Call {
    name: String,
    arguments: Option<JsonObject>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let scenario = arguments.next().unwrap_or_default();
    let parameters = serde_json::from_str(&match arguments.next().as_deref() {
        None => "{}".to_owned(),
        Some("-") => std::io::read_to_string(std::io::stdin())?,
        Some(text) => text.to_owned(),
    })?;
    let findings = match scenario.as_str() {
        "list" => list().await,
        "basics" => basics(parameters).await,
        "parallel" => parallel(parameters).await,
        "progress" => progress(parameters).await,
        "cancel" => cancel(parameters).await,
        "silent" => silent(parameters).await,
        "large" => large(parameters).await,
        _ => bail!("usage: rmcp-client {SCENARIOS} [PARAMETERS|-]"),
    }?;
    writeln!(std::io::stdout(), "{findings}")?;
    Ok(())
}

async fn list() -> Result<Value> {
    let client = connect().await?;
    let tools = tool_names(&client).await?;
    client.cancel().await?;
    Ok(json!({ "tools": tools }))
}

async fn basics(Parameters { calls, .. }: Parameters) -> Result<Value> {
    let client = connect().await?;
    let tools = tool_names(&client).await?;
    let mut results = Vec::new();
    for call in calls {
        results.push(outcome(&client, call).await?);
    }
    let ping = ping(&client).await;
    let peer = client.peer_info().context("the server did not introduce itself")?;
    let findings = json!({
        "serverInfo": peer.server_info,
        "protocolVersion": peer.protocol_version,
        "tools": tools,
        "results": results,
        "ping": ping,
    });
    client.cancel().await?;
    Ok(findings)
}

async fn parallel(Parameters { calls, .. }: Parameters) -> Result<Value> {
    let client = connect().await?;
    let outcomes = join_all(calls.into_iter().map(|call| outcome(&client, call))).await;
    let results = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    client.cancel().await?;
    Ok(json!({ "results": results }))
}

async fn progress(Parameters { call, .. }: Parameters) -> Result<Value> {
    let (client, mut steps) = connect_noting_progress(config()?).await?;
    let results = [outcome(&client, call.context("call is missing")?).await?];
    let mut progress = Vec::new();
    while let Ok(step) = steps.try_recv() {
        progress.push(json!({ "progress": step.progress, "total": step.total, "message": step.message }));
    }
    client.cancel().await?;
    Ok(json!({ "progress": progress, "results": results }))
}

async fn cancel(Parameters { call, .. }: Parameters) -> Result<Value> {
    let (client, mut steps) = connect_noting_progress(config()?).await?;
    let request = request(call.context("call is missing")?);
    let running = client.send_cancellable_request(request, PeerRequestOptions::no_options()).await?;
    steps.recv().await.context("no progress came")?;
    running.cancel(Some("changed my mind".to_owned())).await?;
    let ping = ping(&client).await;
    client.cancel().await?;
    Ok(json!({ "results": [{ "cancelled": true }], "ping": ping }))
}

/// The SDK has no deadline that would have to be lifted.
async fn silent(Parameters { call, .. }: Parameters) -> Result<Value> {
    let client = connect().await?;
    let results = [outcome(&client, call.context("call is missing")?).await?];
    client.cancel().await?;
    Ok(json!({ "results": results }))
}

/// The SDK's own limit for a JSON reply is 16 MiB.
async fn large(Parameters { call, .. }: Parameters) -> Result<Value> {
    let (client, _) = connect_noting_progress(config()?.max_json_response_size(64 << 20)).await?;
    let result = match client.send_request(request(call.context("call is missing")?)).await? {
        ServerResult::CallToolResult(result) => result,
        other => bail!("no result of a call: {other:?}"),
    };
    let text = |block: &Value| block["text"].as_str().map(str::len);
    let content = serde_json::to_value(&result.content)?;
    let characters: Vec<_> = content.as_array().into_iter().flatten().map(text).collect();
    let ping = ping(&client).await;
    client.cancel().await?;
    Ok(json!({ "characters": characters, "ping": ping }))
}

/// Connects in the SDK's default mode.
async fn connect() -> Result<Client> {
    Ok(connect_noting_progress(config()?).await?.0)
}

async fn connect_noting_progress(
    config: StreamableHttpClientTransportConfig,
) -> Result<(Client, mpsc::UnboundedReceiver<ProgressNotificationParam>)> {
    let (noted, steps) = mpsc::unbounded_channel();
    let client = Handler(noted).serve(StreamableHttpClientTransport::from_config(config)).await?;
    Ok((client, steps))
}

fn config() -> Result<StreamableHttpClientTransportConfig> {
    let url = required("A2MCP_URL")?;
    Ok(StreamableHttpClientTransportConfig::with_uri(url).auth_header(required("A2MCP_TOKEN")?))
}

fn request(call: Call) -> ClientRequest {
    let mut params = CallToolRequestParams::new(call.name);
    params.arguments = call.arguments;
    ClientRequest::CallToolRequest(CallToolRequest::new(params))
}

async fn ping(client: &Client) -> Value {
    match client.send_request(ClientRequest::PingRequest(PingRequest::default())).await {
        Ok(_) => json!(true),
        Err(error) => json!(error.to_string()),
    }
}

async fn tool_names(client: &Client) -> Result<Vec<String>> {
    Ok(client.list_all_tools().await?.into_iter().map(|tool| tool.name.into_owned()).collect())
}

async fn outcome(client: &Client, call: Call) -> Result<Value> {
    let mut params = CallToolRequestParams::new(call.name);
    params.arguments = call.arguments;
    match client.call_tool(params).await {
        Ok(result) => {
            let mut content = serde_json::to_value(&result.content)?;
            content.as_array_mut().into_iter().flatten().try_for_each(drop_data)?;
            Ok(json!({ "isError": result.is_error.unwrap_or(false), "content": content }))
        }
        Err(ServiceError::McpError(error)) => {
            Ok(json!({ "error": { "code": error.code.0, "message": error.message } }))
        }
        Err(error) => Err(error.into()),
    }
}

fn drop_data(block: &mut Value) -> Result<()> {
    let block = block.as_object_mut().context("a content block is no object")?;
    if let Some(data) = block.remove("data") {
        let bytes = STANDARD.decode(data.as_str().context("data is no string")?)?.len();
        block.insert("bytes".to_owned(), bytes.into());
    }
    Ok(())
}

fn required(name: &str) -> Result<String> {
    std::env::var(name).map_err(|_| anyhow!("the environment variable {name} is missing"))
}
