//! The agent directory and the name of every file a2mcp keeps in it. Knows names, not contents; the
//! only thing it creates is a private directory.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::Env;

/// One agent directory, with the overrides of the environment applied. All paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentDir {
    root: PathBuf,
    config: PathBuf,
    audit: PathBuf,
}

impl AgentDir {
    /// `root` may be relative to the working directory of `env`.
    pub fn new(root: impl AsRef<Path>, env: &Env) -> AgentDir {
        let root = env.absolute(root.as_ref());
        let or = |given: &Option<PathBuf>, name: &str| match given {
            Some(path) => env.absolute(path),
            None => root.join(name),
        };
        AgentDir { config: or(&env.config, "a2mcp.json"), audit: or(&env.audit, "a2mcp.log"), root }
    }

    /// The directory to use when none was named and no sidecar runs (contract 16): omp's, if it
    /// exists or the environment names it, else `~/.a2mcp`. `None` without a home.
    pub fn default_root(env: &Env) -> Option<PathBuf> {
        if let Some(dir) = &env.pi_agent_dir {
            return Some(env.absolute(dir));
        }
        let home = env.absolute(env.home.as_deref()?);
        let omp = home.join(".omp/agent");
        Some(if omp.is_dir() { omp } else { home.join(".a2mcp") })
    }

    /// Where omp keeps its things: what the environment names, else `~/.omp/agent`. `None` without an
    /// absolute home.
    pub fn omp_root(env: &Env) -> Option<PathBuf> {
        let named = env.pi_agent_dir.as_ref().map(|dir| env.absolute(dir));
        named.or_else(|| {
            env.home.as_deref().filter(|home| home.is_absolute()).map(|home| home.join(".omp/agent"))
        })
    }

    /// The same directory with other files: those that a running sidecar uses.
    pub fn with_files(self, config: impl Into<PathBuf>, audit: impl Into<PathBuf>) -> AgentDir {
        AgentDir { config: config.into(), audit: audit.into(), ..self }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `a2mcp.json`, or what `A2MCP_CONFIG` names.
    pub fn config_file(&self) -> &Path {
        &self.config
    }

    /// `a2mcp.log`, or what `A2MCP_AUDIT` names.
    pub fn audit_file(&self) -> &Path {
        &self.audit
    }

    /// Where state files and the remembered port live.
    pub fn state_dir(&self) -> PathBuf {
        self.root.join("a2mcp.state")
    }

    /// The remembered port: one line.
    pub fn port_file(&self) -> PathBuf {
        self.state_dir().join("port")
    }

    /// The state of the sidecar that holds `port`.
    pub fn state_file(&self, port: u16) -> PathBuf {
        self.state_dir().join(format!("{port}.json"))
    }

    /// The stderr a shim gives to a sidecar that has no port yet.
    pub fn start_stderr(&self) -> PathBuf {
        self.root.join("a2mcp.start.stderr")
    }

    /// The stderr of the sidecar that holds `port`.
    pub fn stderr(&self, port: u16) -> PathBuf {
        self.root.join(format!("a2mcp.{port}.stderr"))
    }

    /// Where `install omp` puts the shim.
    pub fn extension_dir(&self) -> PathBuf {
        self.root.join("extensions").join("a2mcp")
    }

    /// The list of programs a2mcp installed.
    pub fn installs_file(&self) -> PathBuf {
        self.root.join("a2mcp.installs.json")
    }

    /// Creates the directory (0700) when it is missing; one that exists keeps its mode.
    pub fn create(&self) -> io::Result<()> {
        create_private_dir(&self.root)
    }
}

/// Creates `dir` and its missing parents with mode 0700. Fine when it is a directory already.
pub fn create_private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Follows the links at the end of `path` as far as they go, also to a file that does not exist yet:
/// an operator may keep config or log elsewhere, and replacing the link would cut that off.
pub(crate) fn follow_links(path: &Path) -> PathBuf {
    // As many as the kernel follows; then the path is given back and opening it fails with ELOOP.
    const LIMIT: usize = 40;
    let mut at = path.to_path_buf();
    for _ in 0..LIMIT {
        match std::fs::read_link(&at) {
            Ok(target) => at = at.parent().unwrap_or(Path::new("/")).join(target),
            Err(_) => return at,
        }
    }
    path.to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn env(home: &Path) -> Env {
        Env { home: Some(home.into()), cwd: "/base".into(), ..Env::default() }
    }

    #[test]
    fn names_are_those_of_the_contract() {
        let dir = AgentDir::new("./agent", &env(Path::new("/h")));
        assert_eq!(dir.root(), Path::new("/base/agent"));
        assert_eq!(dir.config_file(), Path::new("/base/agent/a2mcp.json"));
        assert_eq!(dir.audit_file(), Path::new("/base/agent/a2mcp.log"));
        assert_eq!(dir.port_file(), Path::new("/base/agent/a2mcp.state/port"));
        assert_eq!(dir.state_file(80), Path::new("/base/agent/a2mcp.state/80.json"));
        assert_eq!(dir.start_stderr(), Path::new("/base/agent/a2mcp.start.stderr"));
        assert_eq!(dir.stderr(80), Path::new("/base/agent/a2mcp.80.stderr"));
        assert_eq!(dir.extension_dir(), Path::new("/base/agent/extensions/a2mcp"));
        assert_eq!(dir.installs_file(), Path::new("/base/agent/a2mcp.installs.json"));
    }

    #[test]
    fn the_environment_moves_config_and_audit_only() {
        let env = Env {
            config: Some("c.json".into()),
            audit: Some("/elsewhere/log".into()),
            ..env(Path::new("/h"))
        };
        let dir = AgentDir::new("/agent", &env);
        assert_eq!(dir.config_file(), Path::new("/base/c.json"));
        assert_eq!(dir.audit_file(), Path::new("/elsewhere/log"));
        assert_eq!(dir.state_dir(), Path::new("/agent/a2mcp.state"));
    }

    #[test]
    fn the_default_is_omp_when_it_is_there() {
        let home = tempfile::tempdir().unwrap();
        let env = env(home.path());
        assert_eq!(AgentDir::default_root(&env).unwrap(), home.path().join(".a2mcp"));
        std::fs::create_dir_all(home.path().join(".omp/agent")).unwrap();
        assert_eq!(AgentDir::default_root(&env).unwrap(), home.path().join(".omp/agent"));
        let moved = Env { pi_agent_dir: Some("p".into()), ..env };
        assert_eq!(AgentDir::default_root(&moved).unwrap(), Path::new("/base/p"));
        assert_eq!(AgentDir::default_root(&Env::default()), None);
    }

    #[test]
    fn a_new_agent_directory_is_private() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = AgentDir::new(tmp.path().join("a/b"), &Env::default());
        dir.create().unwrap();
        dir.create().unwrap();
        let mode = std::fs::metadata(dir.root()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn links_are_followed_to_files_that_do_not_exist_yet() {
        let tmp = tempfile::tempdir().unwrap();
        let link = tmp.path().join("link");
        std::os::unix::fs::symlink("sub/target", &link).unwrap();
        assert_eq!(follow_links(&link), tmp.path().join("sub/target"));
        let ring = tmp.path().join("ring");
        std::os::unix::fs::symlink("ring", &ring).unwrap();
        assert_eq!(follow_links(&ring), ring);
    }
}
