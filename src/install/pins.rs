//! The builds of dufs and cloudflared that a2mcp may fetch: version, asset and sha256 as literals.
//! Nothing is ever asked for its newest version or its checksum; an upgrade is a change of this table.
//!
//! A hash stands here only when it is attested by somebody other than the server that gives the
//! bytes. A platform without one is not offered.

use super::Tool;

/// How the program lies in its asset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A tar archive under gzip (`.tar.gz`, `.tgz`).
    TarGz,
    /// A zip archive.
    Zip,
    /// The asset is the program.
    Bare,
}

/// One build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Of which program.
    pub tool: Tool,
    /// `std::env::consts::OS`.
    pub os: &'static str,
    /// `std::env::consts::ARCH`.
    pub arch: &'static str,
    /// As the program itself says it.
    pub version: &'static str,
    /// The path below the download base, up to the asset's name.
    pub folder: &'static str,
    /// The file to fetch.
    pub asset: &'static str,
    /// Hash of the asset as it is fetched, lower-case hex.
    pub sha256: &'static str,
    /// Its size in bytes: what progress is measured against, never what is trusted.
    pub bytes: u64,
    /// How to get the program out of it.
    pub format: Format,
    /// Hash of the program inside, where it is attested. Checked after the asset's own: the notes of
    /// cloudflared's releases give this one where the archive's belongs.
    pub program_sha256: Option<&'static str>,
}

impl Pin {
    /// The program's file name, in the asset and where it is installed.
    pub fn program(&self) -> String {
        format!("{}{}", self.tool.name(), if self.os == "windows" { ".exe" } else { "" })
    }

    /// The installed program's hash, if it is known without unpacking.
    pub fn known_program_hash(&self) -> Option<&'static str> {
        if self.format == Format::Bare { Some(self.sha256) } else { self.program_sha256 }
    }
}

const fn dufs(
    os: &'static str,
    arch: &'static str,
    asset: &'static str,
    sha256: &'static str,
    bytes: u64,
    format: Format,
) -> Pin {
    Pin {
        tool: Tool::Dufs,
        os,
        arch,
        version: "0.46.0",
        folder: "sigoden/dufs/releases/download/v0.46.0",
        asset,
        sha256,
        bytes,
        format,
        program_sha256: None,
    }
}

const fn cloudflared(
    os: &'static str,
    arch: &'static str,
    asset: &'static str,
    sha256: &'static str,
    bytes: u64,
    format: Format,
    program_sha256: Option<&'static str>,
) -> Pin {
    Pin {
        tool: Tool::Cloudflared,
        os,
        arch,
        version: "2026.10.0",
        folder: "cloudflare/cloudflared/releases/download/2026.10.0",
        asset,
        sha256,
        bytes,
        format,
        program_sha256,
    }
}

/// All of them.
pub const ALL: &[Pin] = &[
    dufs(
        "linux",
        "x86_64",
        "dufs-v0.46.0-x86_64-unknown-linux-musl.tar.gz",
        "817769f726613194bcff9d0e3e481eaccc86ac11208857614f36a8c02f410977",
        2_898_409,
        Format::TarGz,
    ),
    dufs(
        "linux",
        "aarch64",
        "dufs-v0.46.0-aarch64-unknown-linux-musl.tar.gz",
        "1472123ae3aa07e49404d16b20305c2dec90c59883ebda9308717f7205e6511b",
        2_618_631,
        Format::TarGz,
    ),
    dufs(
        "macos",
        "aarch64",
        "dufs-v0.46.0-aarch64-apple-darwin.tar.gz",
        "2c73fa330447c344111aea9159621af5e2d4460b9227562e09138e5c01d3becf",
        2_462_445,
        Format::TarGz,
    ),
    // Attested once only. Were it wrong, installing would fail, and nothing worse.
    dufs(
        "macos",
        "x86_64",
        "dufs-v0.46.0-x86_64-apple-darwin.tar.gz",
        "f494db0de9e95764199781754147c4a341227d4794b1bcf5dac862bd21c1216a",
        2_764_841,
        Format::TarGz,
    ),
    dufs(
        "windows",
        "x86_64",
        "dufs-v0.46.0-x86_64-pc-windows-msvc.zip",
        "21d829653ac1f178b124ed384e2a57df19b99ae404935cba9a1a5719c199b0bf",
        2_323_817,
        Format::Zip,
    ),
    dufs(
        "windows",
        "aarch64",
        "dufs-v0.46.0-aarch64-pc-windows-msvc.zip",
        "530e061b5a26182a7cfebc3d473c397aaef931b07f6eccab9592d5df57ef0c39",
        2_331_484,
        Format::Zip,
    ),
    cloudflared(
        "linux",
        "x86_64",
        "cloudflared-linux-amd64",
        "d33ff2d14475178d2012c2c56beba87389ac5ded27649519f198a7d3134a99db",
        40_129_756,
        Format::Bare,
        None,
    ),
    cloudflared(
        "linux",
        "aarch64",
        "cloudflared-linux-arm64",
        "e6422b9d4f72d3194bc5a38676f13667c06666523217b842a877d72a80b5ac08",
        37_687_584,
        Format::Bare,
        None,
    ),
    cloudflared(
        "macos",
        "x86_64",
        "cloudflared-darwin-amd64.tgz",
        "903845b81828c8cb3c5d13d816a2de71c06a3da5785469df8eb0e1b736d92f9f",
        21_741_581,
        Format::TarGz,
        Some("0560c9ab7281ac3f746055323623ed23bc0405b6dab9400474020cba33a978da"),
    ),
    cloudflared(
        "macos",
        "aarch64",
        "cloudflared-darwin-arm64.tgz",
        "a2f79ff7b9420aa537d74af239f376da170bbabeb529aec416002adac6a72e70",
        19_809_074,
        Format::TarGz,
        Some("72edfd3eea463aef4d5cb89e2e209cecb048cc756c2b01915de2e0ad7cb39830"),
    ),
    cloudflared(
        "windows",
        "x86_64",
        "cloudflared-windows-amd64.exe",
        "86aee4017b26625cee8484c113558f48effa4cd47f7aa05fcf425604e5d2b23c",
        55_365_048,
        Format::Bare,
        None,
    ),
];

/// The pins of this build.
#[cfg(not(debug_assertions))]
pub(super) fn table() -> Vec<Pin> {
    ALL.to_vec()
}

/// The pins of this build; a debug build takes those of the file that `A2MCP_TEST_PINS` names instead,
/// so that tests of whole processes can serve assets of their own. In a release build nothing of this
/// exists.
#[cfg(debug_assertions)]
pub(super) fn table() -> Vec<Pin> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Row {
        tool: String,
        version: String,
        folder: String,
        asset: String,
        sha256: String,
        bytes: u64,
        format: String,
        program_sha256: Option<String>,
    }
    let leak = |text: String| -> &'static str { text.leak() };
    let pin = |row: Row| Pin {
        tool: if row.tool == "dufs" { Tool::Dufs } else { Tool::Cloudflared },
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        version: leak(row.version),
        folder: leak(row.folder),
        asset: leak(row.asset),
        sha256: leak(row.sha256),
        bytes: row.bytes,
        format: match row.format.as_str() {
            "tar.gz" => Format::TarGz,
            "zip" => Format::Zip,
            _ => Format::Bare,
        },
        program_sha256: row.program_sha256.map(leak),
    };
    let rows = std::env::var_os("A2MCP_TEST_PINS").and_then(|file| std::fs::read(file).ok());
    let rows = rows.and_then(|text| serde_json::from_slice::<Vec<Row>>(&text).ok());
    rows.map_or_else(|| ALL.to_vec(), |rows| rows.into_iter().map(pin).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        let is_hash = |hash: &str| {
            hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        for (at, pin) in ALL.iter().enumerate() {
            assert!(is_hash(pin.sha256), "{}", pin.asset);
            assert!(pin.program_sha256.is_none_or(|hash| is_hash(hash) && hash != pin.sha256));
            assert!(pin.folder.ends_with(pin.version) && !pin.folder.contains("latest"));
            assert!(pin.bytes <= crate::install::Limits::default().bytes, "{}", pin.asset);
            let ending = match pin.format {
                Format::TarGz => pin.asset.ends_with(".tar.gz") || pin.asset.ends_with(".tgz"),
                Format::Zip => pin.asset.ends_with(".zip"),
                Format::Bare => !pin.asset.ends_with("gz") && !pin.asset.ends_with(".zip"),
            };
            assert!(ending, "{}", pin.asset);
            let again = |other: &Pin| {
                other.sha256 == pin.sha256
                    || (other.tool, other.os, other.arch) == (pin.tool, pin.os, pin.arch)
            };
            assert!(!ALL[at + 1..].iter().any(again), "{} stands twice", pin.asset);
        }
        // What the release notes give for the archives is the program inside.
        let tgz: Vec<_> = ALL.iter().filter(|pin| pin.asset.ends_with(".tgz")).collect();
        assert!(tgz.len() == 2 && tgz.iter().all(|pin| pin.program_sha256.is_some()));
    }
}
