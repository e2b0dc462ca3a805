//! `a2mcp install omp` and its undo, as a person does it.

use std::os::unix::fs::PermissionsExt as _;

use crate::omp::{Home, Omp, run};
use crate::support::binary;

#[test]
fn a_build_directory_is_refused_without_force() {
    let home = Home::bare();
    let output = home.a2mcp(&["install", "omp"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("target/") && said.contains("--force"), "{said}");
    assert!(!home.agent("extensions").exists());
}

#[test]
fn installed_served_uninstalled_gone() {
    let home = Home::bare();
    // Where people keep it. The binary is large: a link is enough, unless the file systems differ.
    let lasting = home.path().join("bin/a2mcp");
    std::fs::create_dir(lasting.parent().unwrap()).unwrap();
    if std::fs::hard_link(binary(), &lasting).is_err() {
        std::fs::copy(binary(), &lasting).unwrap();
    }
    let a2mcp = |args: &[&str]| {
        let mut command = home.command(&lasting);
        command.args(args);
        let output = run(command, Vec::new());
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    // Without a directory named, omp's own is meant.
    let said = a2mcp(&["install", "omp"]);
    let undo = said
        .lines()
        .find_map(|line| line.strip_prefix("Undo: "))
        .unwrap_or_else(|| panic!("{said}"))
        .to_owned();
    let shim = home.agent("extensions/a2mcp");
    assert!(shim.join("index.ts").is_file());
    let marker: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shim.join("binary.json")).unwrap()).unwrap();
    assert_eq!(marker["binary"], lasting.canonicalize().unwrap().to_str().unwrap());
    assert!(a2mcp(&["install", "omp"]).contains("up to date"));

    let omp = Omp::setup(home).bridged();
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    let home = omp.home.clone();
    let executable = std::fs::read_link(format!("/proc/{}/exe", omp.sidecar())).unwrap();
    assert_eq!(executable, lasting.canonicalize().unwrap());
    for file in ["a2mcp.json", "a2mcp.log", "a2mcp.start.stderr"] {
        let mode = std::fs::metadata(home.agent(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{file} can be read by others");
    }
    let port = omp.port;
    drop(omp);
    assert_eq!(crate::processes::until_gone(home.path()).map_err(|left| format!("{left:#?}")), Ok(()));

    // The undo that was printed, run as it was printed.
    let mut command = home.command("/bin/sh");
    command.args(["-c", &undo]);
    let output = run(command, Vec::new());
    assert!(output.status.success(), "{undo:?}: {output:?}");
    assert!(!shim.exists());
    assert!(home.agent("a2mcp.json").exists() && home.agent("a2mcp.log").exists(), "config and audit stay");

    let omp = Omp::setup(home).spawn();
    omp.assert_alive();
    assert!(omp.home.sidecars().is_empty());
    assert_eq!(omp.notices(), Vec::<String>::new());
    assert!(crate::support::http::Connection::try_open(port).is_err());
}
