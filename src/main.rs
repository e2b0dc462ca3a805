//! The `a2mcp` binary; everything is in the library.

fn main() -> std::process::ExitCode {
    a2mcp::cli::main()
}
