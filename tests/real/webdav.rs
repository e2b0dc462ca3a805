//! WebDAV clients of Debian: whichever is installed works; without any, the test says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::share::{Shared, VERSIONS};

fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: {name} is not installed (apt-get install {name}); this client was not tried");
    }
    found
}

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(status.success(), "{command:?}: {}{}", text(&stdout), text(&stderr));
    text(&stdout)
}

#[test]
fn rclone_lists_copies_and_checks() {
    let Some(program) = installed("rclone") else { return };
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("down/a file.txt", "from the share");
        shared.write("down/\u{65e5}\u{672c}/x", "deep");
        let config = shared.outside().join("rclone.conf");
        std::fs::write(
            &config,
            format!(
                "[share]\ntype = webdav\nurl = {}\nvendor = other\nbearer_token = {}\n",
                shared.url("/"),
                shared.host.token
            ),
        )
        .unwrap();
        let rclone = |args: &[&str]| {
            let mut command = Command::new(&program);
            command
                .arg("--config")
                .arg(&config)
                .args(["--retries", "1", "--low-level-retries", "1"])
                .args(args);
            run(&mut command)
        };
        let listed = rclone(&["lsf", "-R", "share:"]);
        assert!(
            listed.contains("down/a file.txt\n") && listed.contains("down/\u{65e5}\u{672c}/x\n"),
            "{listed}"
        );
        let local = shared.outside().join("local");
        rclone(&["copy", "share:down", local.to_str().unwrap()]);
        assert_eq!(read(&local.join("a file.txt")), "from the share");
        std::fs::create_dir_all(local.join("new/er")).unwrap();
        std::fs::write(local.join("new/er/\u{1f600} %41#.txt"), "to the share").unwrap();
        std::fs::write(local.join("a file.txt"), "changed, and longer").unwrap();
        rclone(&["copy", local.to_str().unwrap(), "share:up"]);
        rclone(&["copy", local.to_str().unwrap(), "share:down"]);
        assert_eq!(shared.read("up/new/er/\u{1f600} %41#.txt").unwrap(), b"to the share");
        assert_eq!(shared.read("down/a file.txt").unwrap(), b"changed, and longer");
        rclone(&["check", "--size-only", local.to_str().unwrap(), "share:up"]);
        assert_eq!(rclone(&["cat", "share:up/a file.txt"]), "changed, and longer");
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}
