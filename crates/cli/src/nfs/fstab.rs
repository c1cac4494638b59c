//! A line in `/etc/fstab`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::mount_line::field;
use crate::failure::{Exit, Failure};

/// Puts `line`, which mounts on `directory`, into the table. A line of NFS for the same directory and source is replaced, any other
/// for the directory refused.
/// The table is replaced at once: a crash leaves the old or the new one.
pub(super) fn add(table: &Path, directory: &Path, line: &str) -> Result<(), Failure> {
    let what = format!("cannot change {}", table.display());
    let failed = |error: &io::Error| Failure::io(&what, error);
    let old = match fs::read(table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        old => old.map_err(|error| failed(&error))?,
    };
    let own = field(directory.as_os_str().as_bytes());
    let mut new: Vec<&[u8]> = Vec::new();
    for old in old.split_inclusive(|byte| *byte == b'\n') {
        let text = String::from_utf8_lossy(old);
        let fields: Vec<&str> = text.split_whitespace().collect();
        let is_of_it = !text.trim_start().starts_with('#') && fields.get(1) == Some(&&*own);
        let is_same_source = fields.first() == line.split(' ').next().as_ref();
        match (is_of_it, fields.get(2)) {
            (false, _) => new.push(old),
            (true, Some(&"nfs")) if is_same_source => {}
            (true, _) => {
                return Err(Failure::new(Exit::Failed, what).because(format!(
                    "another line is for {}: {}",
                    directory.display(),
                    text.trim()
                )));
            }
        }
    }
    let mut new = new.concat();
    if !new.is_empty() && !new.ends_with(b"\n") {
        new.push(b'\n');
    }
    new.extend_from_slice(line.as_bytes());
    new.push(b'\n');
    if new != old {
        replace(table, &new).map_err(|error| {
            let failure = failed(&error);
            match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    failure.advice("Run it as root: sudo atoll nfs …")
                }
                _ => failure,
            }
        })?;
    }
    Ok(())
}

fn replace(table: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link to the table stays one.
    let table = fs::canonicalize(table).unwrap_or_else(|_| table.to_owned());
    let mut beside = table.clone().into_os_string();
    beside.push(".atoll-new");
    let written = (|| {
        let mut file = File::create_new(&beside)?;
        file.write_all(bytes)?;
        if let Ok(old) = fs::metadata(&table) {
            file.set_permissions(old.permissions())?;
        }
        file.sync_all()?;
        fs::rename(&beside, &table)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_added_replaced_and_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let table = dir.path().join("fstab");
        let read = || fs::read_to_string(&table).expect("it is there");
        fs::write(&table, "# comment /srv/x nfs\n/dev/sda1 / ext4 defaults 0 1").expect("written");
        let line = |n| format!("h:/work /srv/x nfs port={n} 0 0");
        add(&table, Path::new("/srv/x"), &line(1)).expect("added");
        add(&table, Path::new("/srv/x"), &line(1)).expect("there already");
        let begin = "# comment /srv/x nfs\n/dev/sda1 / ext4 defaults 0 1\n";
        assert_eq!(read(), format!("{begin}{}\n", line(1)));
        add(&table, Path::new("/srv/x"), &line(2)).expect("replaced");
        assert_eq!(read(), format!("{begin}{}\n", line(2)));
        add(&table, Path::new("/srv/x"), "h:/other /srv/x nfs x 0 0")
            .expect_err("another server's");
        add(&table, Path::new("/"), "h:/work / nfs x 0 0")
            .expect_err("another file system's place");
        assert_eq!(read(), format!("{begin}{}\n", line(2)));
        let gone = dir.path().join("none/fstab");
        add(&gone, Path::new("/srv/x"), &line(1)).expect_err("no such directory");
    }
}
