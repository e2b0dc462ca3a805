//! Where the real programs are. Whoever asks for one that is missing is told what to do.

use std::path::{Path, PathBuf};

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A program or file that `tests/setup` puts there.
pub(crate) fn installed(part: &str) -> PathBuf {
    let path = root().join("target/real-parts").join(part);
    assert!(path.exists(), "target/real-parts/{part} is missing: run tests/setup, which installs it");
    path
}

/// The `PATH` for programs that need omp or Bun.
pub(crate) fn path_variable() -> String {
    let omp = installed("omp/node_modules/.bin/omp");
    installed("omp/node_modules/.bin/bun");
    format!("{}:/usr/local/bin:/usr/bin:/bin", omp.parent().unwrap().display())
}

/// A program of the machine itself.
pub(crate) fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|directory| directory.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{name} is missing: tests/setup says how to get it"))
}
