//! Contract 15, planned restart: the binary that is on disk by then starts, after it was tried; one
//! that cannot run leaves the old one serving.

use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use crate::support::reference::Host;
use crate::support::{binary, cli};

/// Replaces the program as a package manager does: beside it, then renamed over it.
fn replace(program: &Path, with: impl FnOnce(&Path)) -> u64 {
    let beside = program.with_extension("new");
    with(&beside);
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(&beside, program).unwrap();
    std::fs::metadata(program).unwrap().ino()
}

fn this_build(path: &Path) {
    std::fs::copy(binary(), path).unwrap();
}

/// Which file the host's sidecar runs.
fn running(host: &Host) -> u64 {
    std::fs::metadata(format!("/proc/{}/exe", host.sidecar().pid)).unwrap().ino()
}

#[test]
fn a_restart_runs_the_binary_that_is_on_disk_by_then_if_it_can_run() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("a2mcp-of-this-test");
    let first = replace(&program, this_build);
    let path = program.to_str().unwrap().to_owned();
    let mut host = Host::start_in(dir, &["--sidecar", &path]);
    let client = host.session();
    let restart = |host: &Host| cli(&["restart"], Some(host.dir.path()), &HashMap::new());
    assert_eq!(running(&host), first);

    let second = replace(&program, this_build);
    assert_ne!(second, first);
    let (code, _, err) = restart(&host);
    assert_eq!(code, 0, "{err}");
    host.next_sidecar();
    assert_eq!(running(&host), second, "the new one runs");
    assert_eq!(client.again().call_text("echo", r#"{"n":1}"#), r#"{"n":1}"#, "for the old sessions");

    let broken = [
        ("libfoo.so.9 is missing", "#!/bin/sh\necho 'libfoo.so.9 is missing' >&2\nexit 127\n"),
        ("a2mcp-of-this-test", "half a downlo"),
    ];
    for (why, content) in broken {
        replace(&program, |path| std::fs::write(path, content).unwrap());
        let (code, out, err) = restart(&host);
        assert_eq!(code, 1, "{out}");
        assert!(err.contains("not restarted") && err.contains(why), "{err}");
        assert_eq!(running(&host), second, "the old one goes on");
    }
    std::fs::remove_file(&program).unwrap();
    let (code, _, err) = restart(&host);
    assert!(code == 1 && err.contains("not restarted"), "{err}");
    assert_eq!(client.again().call_text("echo", r#"{"n":2}"#), r#"{"n":2}"#);

    // Moved aside, as some updates do it: what counts is what is at the path.
    let third = replace(&program, this_build);
    assert_eq!(restart(&host).0, 0);
    host.next_sidecar();
    assert_eq!(running(&host), third);
    std::fs::rename(&program, program.with_extension("old")).unwrap();
    let (code, _, err) = restart(&host);
    assert!(code == 1 && err.contains("not restarted"), "{err}");
    replace(&program, |path| std::fs::write(path, "#!/bin/sh\necho 'broken update' >&2\nexit 1\n").unwrap());
    let (code, _, err) = restart(&host);
    assert!(code == 1 && err.contains("broken update"), "{err}");
    assert_eq!(client.again().call_text("echo", r#"{"n":3}"#), r#"{"n":3}"#);

    let fourth = replace(&program, this_build);
    assert_eq!(restart(&host).0, 0);
    host.next_sidecar();
    assert_eq!(running(&host), fourth);
    assert_eq!(client.again().call_text("echo", r#"{"n":4}"#), r#"{"n":4}"#);
}
