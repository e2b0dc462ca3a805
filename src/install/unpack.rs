//! Takes the one wanted program out of an asset whose hash was right. Nothing else is ever written,
//! and never to a path that the archive names; an archive that tries to escape is refused as a whole,
//! because then it is not what it claims to be. Blocking, constant memory.

use std::fs::File;
use std::io::{self, Read, Seek as _, Write};

use sha2::{Digest as _, Sha256};

use super::lookup::hex;
use super::pins::{Format, Pin};
use crate::text::clean;

/// An archive with more entries is refused.
const MAX_ENTRIES: usize = 10_000;

/// Why there is no program.
#[derive(Debug)]
pub(super) enum UnpackError {
    /// The archive; in words.
    Archive(String),
    /// The disk that is written to.
    Disk(io::Error),
}

use UnpackError::Archive;

/// Writes the program that `pin` wants from `asset` to `out`; its hash. `limit` bounds everything that
/// comes out of the archive.
pub(super) fn unpack(mut asset: &File, pin: &Pin, out: &mut File, limit: u64) -> Result<String, UnpackError> {
    asset.rewind().map_err(UnpackError::Disk)?;
    let wanted = pin.program();
    match pin.format {
        Format::TarGz => tar_gz(asset, &wanted, out, limit),
        Format::Zip => zip(asset, &wanted, out, limit),
        Format::Bare => copy(&mut Bounded { inner: asset, left: limit, limit }, out).map(|(_, hash)| hash),
    }
}

fn tar_gz(asset: &File, wanted: &str, out: &mut File, limit: u64) -> Result<String, UnpackError> {
    let unpacked = flate2::read::GzDecoder::new(io::BufReader::new(asset));
    let mut archive = tar::Archive::new(Bounded { inner: unpacked, left: limit, limit });
    let mut found = None;
    // Raw: no entry may change what the next one is called.
    for (at, entry) in archive.entries().map_err(|error| damaged(&error))?.raw(true).enumerate() {
        let mut entry = entry.map_err(|error| damaged(&error))?;
        check_count(at)?;
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() || kind.is_pax_local_extensions() {
            continue;
        }
        if kind.is_gnu_longname() || kind.is_gnu_longlink() {
            return Err(Archive("it holds an entry with an over-long name".into()));
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if !is_wanted(&name, wanted)? {
            continue;
        }
        if kind != tar::EntryType::Regular && kind != tar::EntryType::Continuous {
            return Err(Archive(format!("its entry {wanted} is no plain file")));
        }
        let size = entry.size();
        let (copied, hash) = copy(&mut entry, out)?;
        if copied != size {
            return Err(Archive(format!("it is cut off inside {wanted}")));
        }
        put(&mut found, hash, wanted)?;
    }
    found.ok_or_else(|| missing(wanted))
}

fn zip(asset: &File, wanted: &str, out: &mut File, limit: u64) -> Result<String, UnpackError> {
    let refused = |error: zip::result::ZipError| {
        Archive(format!("it cannot be read ({})", clean(&error.to_string(), 200)))
    };
    let mut archive = zip::ZipArchive::new(io::BufReader::new(asset)).map_err(refused)?;
    check_count(archive.len())?;
    if archive.has_duplicate_names() {
        return Err(Archive("it holds two entries of one name".into()));
    }
    let mut found = None;
    for at in 0..archive.len() {
        let name = archive.name_for_index(at).transpose().map_err(refused)?.unwrap_or_default().into_owned();
        if !is_wanted(&name, wanted)? {
            continue;
        }
        let entry = archive.by_index(at).map_err(refused)?;
        // The upper bits of a Unix mode: anything but a plain file, a link above all.
        let kind = entry.unix_mode().map_or(0, |mode| mode & 0o170_000);
        if entry.is_dir() || !matches!(kind, 0 | 0o100_000) {
            return Err(Archive(format!("its entry {wanted} is no plain file")));
        }
        let (_, hash) = copy(&mut Bounded { inner: entry, left: limit, limit }, out)?;
        put(&mut found, hash, wanted)?;
    }
    found.ok_or_else(|| missing(wanted))
}

/// Whether an entry of this name is the program; an error when it points out of the archive.
fn is_wanted(name: &str, wanted: &str) -> Result<bool, UnpackError> {
    let is_drive = name.as_bytes().get(1) == Some(&b':');
    if name.starts_with(['/', '\\']) || is_drive || name.split(['/', '\\']).any(|part| part == "..") {
        return Err(Archive(format!("its entry {} points out of it", clean(name, 100))));
    }
    Ok(name.strip_prefix("./").unwrap_or(name) == wanted)
}

fn check_count(entries: usize) -> Result<(), UnpackError> {
    if entries > MAX_ENTRIES {
        return Err(Archive(format!("it holds more than {MAX_ENTRIES} entries")));
    }
    Ok(())
}

fn put(found: &mut Option<String>, hash: String, wanted: &str) -> Result<(), UnpackError> {
    match found.replace(hash) {
        None => Ok(()),
        Some(_) => Err(Archive(format!("it holds {wanted} twice"))),
    }
}

fn missing(wanted: &str) -> UnpackError {
    Archive(format!("there is no {wanted} at its top"))
}

fn damaged(error: &io::Error) -> UnpackError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Archive("it is cut off".into()),
        _ => Archive(format!("it cannot be read ({})", clean(&error.to_string(), 200))),
    }
}

/// Copies everything; how much, and its hash. Tells a bad archive from a bad disk.
fn copy(from: &mut impl Read, to: &mut File) -> Result<(u64, String), UnpackError> {
    let mut buffer = vec![0; 128 * 1024];
    let (mut copied, mut hash) = (0, Sha256::new());
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok((copied, hex(&hash.finalize()))),
            Ok(n) => {
                to.write_all(&buffer[..n]).map_err(UnpackError::Disk)?;
                hash.update(&buffer[..n]);
                copied += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(damaged(&error)),
        }
    }
}

/// Refuses to give more than `limit` bytes.
struct Bounded<R> {
    inner: R,
    left: u64,
    limit: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(n as u64)
            .ok_or_else(|| io::Error::other(format!("it unpacks to more than {} bytes", self.limit)))?;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::{Tool, pins};
    use flate2::{Compression, write::GzEncoder};
    use tar::{EntryType, Header};

    const PROGRAM: &[u8] = b"#!/bin/sh\necho dufs 0.46.0\n";
    const LIMIT: u64 = 1 << 20;

    /// What comes out, or why nothing does.
    fn unpacked(format: Format, bytes: &[u8]) -> Result<Vec<u8>, String> {
        let pin = Pin { format, tool: Tool::Dufs, os: "linux", ..pins::ALL[0] };
        let mut asset = tempfile::tempfile().unwrap();
        asset.write_all(bytes).unwrap();
        let mut out = tempfile::tempfile().unwrap();
        let hash = unpack(&asset, &pin, &mut out, LIMIT).map_err(|error| match error {
            Archive(why) => why,
            UnpackError::Disk(error) => panic!("{error}"),
        })?;
        out.rewind().unwrap();
        let mut content = Vec::new();
        out.read_to_end(&mut content).unwrap();
        assert_eq!(hash, hex(&Sha256::digest(&content)));
        Ok(content)
    }

    fn refused(format: Format, bytes: &[u8], part: &str) {
        let why = unpacked(format, bytes).unwrap_err();
        assert!(why.contains(part), "{part}: {why}");
    }

    fn gz(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// A tar of these entries: raw name, kind, content.
    fn tar(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, content) in entries {
            let mut header = Header::new_ustar();
            // The crate's own setter refuses exactly what is to be tried.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            header.set_size(content.len() as u64);
            header.set_cksum();
            builder.append(&header, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn tgz(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        gz(&tar(entries))
    }

    fn zipped(entries: &[(&str, &[u8], u32)]) -> Vec<u8> {
        let mut writer = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
        for (name, content, mode) in entries {
            let options = zip::write::SimpleFileOptions::default()
                .compression_method(zip::CompressionMethod::Deflated)
                .unix_permissions(0o755);
            if mode & 0o170_000 == 0o120_000 {
                writer.add_symlink(*name, "/etc/passwd", options).unwrap();
            } else {
                writer.start_file(*name, options).unwrap();
                writer.write_all(content).unwrap();
            }
        }
        writer.finish().unwrap().into_inner()
    }

    const FILE: EntryType = EntryType::Regular;

    #[test]
    fn the_one_wanted_entry_comes_out_of_a_tar() {
        for name in ["dufs", "./dufs"] {
            let archive = tgz(&[
                ("README", FILE, b"x"),
                ("a/dufs", FILE, b"no"),
                ("pax", EntryType::XHeader, b"13 path=../x\n"),
                (name, FILE, PROGRAM),
                ("l", EntryType::Symlink, b""),
            ]);
            assert_eq!(unpacked(Format::TarGz, &archive).unwrap(), PROGRAM);
        }
    }

    #[test]
    fn a_tar_that_tries_something_is_refused() {
        let refused = |entries: &[_], part| refused(Format::TarGz, &tgz(entries), part);
        for name in ["/dufs", "../dufs", "a/../../dufs", "..\\dufs", "C:\\dufs", ".."] {
            refused(&[("dufs", FILE, PROGRAM), (name, FILE, PROGRAM)], "points out of it");
        }
        for kind in
            [EntryType::Symlink, EntryType::Link, EntryType::Directory, EntryType::Fifo, EntryType::Char]
        {
            refused(&[("dufs", kind, b"")], "no plain file");
        }
        refused(&[("other", FILE, PROGRAM)], "there is no dufs at its top");
        refused(&[], "there is no dufs");
        refused(&[("dufs", FILE, PROGRAM), ("./dufs", FILE, PROGRAM)], "dufs twice");
        refused(&[("x", EntryType::GNULongName, b"dufs\0"), ("y", FILE, PROGRAM)], "over-long name");
        let many: Vec<_> = (0..=MAX_ENTRIES + 1).map(|_| ("x", EntryType::Directory, &b""[..])).collect();
        let why = {
            let pin = Pin { format: Format::TarGz, os: "linux", ..pins::ALL[0] };
            let mut asset = tempfile::tempfile().unwrap();
            asset.write_all(&tgz(&many)).unwrap();
            unpack(&asset, &pin, &mut tempfile::tempfile().unwrap(), 1 << 30).unwrap_err()
        };
        assert!(matches!(why, Archive(why) if why.contains("entries")));
    }

    #[test]
    fn bombs_and_damage_are_refused() {
        let zeros = vec![0; LIMIT as usize + 1];
        refused(Format::TarGz, &tgz(&[("dufs", FILE, &zeros)]), "more than 1048576 bytes");
        refused(
            Format::TarGz,
            &tgz(&[("x", FILE, &zeros), ("dufs", FILE, PROGRAM)]),
            "more than 1048576 bytes",
        );
        refused(Format::Zip, &zipped(&[("dufs", &zeros, 0)]), "more than 1048576 bytes");
        let noise: Vec<u8> =
            (0..50_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let whole = tar(&[("dufs", FILE, &noise)]);
        refused(Format::TarGz, &gz(&whole[..100_000]), "cut off");
        let archive = gz(&whole);
        for length in [0, 1, 10, 1000, archive.len() / 2] {
            let why = unpacked(Format::TarGz, &archive[..length]).unwrap_err();
            assert!(why.contains("cut off") || why.contains("cannot be read"), "{length}: {why}");
        }
        refused(Format::TarGz, b"<html>no archive</html>", "cannot be read");
        refused(Format::TarGz, &gz(&[7; 4096]), "cannot be read");
        let archive = zipped(&[("dufs", &noise, 0)]);
        refused(Format::Zip, &archive[..archive.len() / 2], "cannot be read");
        refused(Format::Zip, b"PK\x03\x04", "cannot be read");
        let mut bent = archive.clone();
        bent[1000] ^= 0xff;
        assert!(unpacked(Format::Zip, &bent).is_err());
    }

    #[test]
    fn the_one_wanted_entry_comes_out_of_a_zip() {
        let archive = zipped(&[("README", b"x", 0), ("a/dufs", b"no", 0), ("dufs", PROGRAM, 0)]);
        assert_eq!(unpacked(Format::Zip, &archive).unwrap(), PROGRAM);
        refused(Format::Zip, &zipped(&[("dufs", PROGRAM, 0), ("../x", b"", 0)]), "points out of it");
        refused(Format::Zip, &zipped(&[("dufs", PROGRAM, 0), ("..\\x", b"", 0)]), "points out of it");
        refused(Format::Zip, &zipped(&[("dufs", b"", 0o120_777)]), "no plain file");
        refused(Format::Zip, &zipped(&[("dufs/", b"", 0)]), "there is no dufs");
        refused(Format::Zip, &zipped(&[("x", b"", 0)]), "there is no dufs");
    }

    #[test]
    fn a_bare_asset_is_the_program() {
        assert_eq!(unpacked(Format::Bare, PROGRAM).unwrap(), PROGRAM);
    }
}
