//! `atoll lab` as a person meets it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::processes::{atoll, run};

#[test]
fn experiments_are_listed() {
    let list = run(atoll().args(["lab", "list"])).ok().stdout;
    assert!(list.contains("cfs-fig9 ") && list.contains("Figure 9"), "{list}");
    let json = run(atoll().args(["lab", "list", "--json"])).ok().json_lines();
    assert_eq!(json.len(), list.lines().count());
    assert!(json.iter().any(|e| e["name"] == "cfs-fig13" && e["source"] != ""), "{json:?}");
}

#[test]
fn an_experiment_leaves_points_and_a_plot_and_says_how_to_repeat_it() {
    let temp = tempfile::tempdir().expect("temp");
    let out = temp.path().join("deep/lab");
    let lab = |json: bool| {
        let mut command = atoll();
        command.args(["lab", "run", "cfs-fig10", "--quick", "--runs", "1", "--seed", "5", "--out"]);
        command.arg(&out);
        if json {
            command.arg("--json")
        } else {
            &mut command
        };
        run(&mut command).ok()
    };
    let said = lab(false);
    for part in ["paper", "Atoll (paper's settings)", "Atoll (default settings)", "seed 5"] {
        assert!(said.stdout.contains(part), "{part}: {}", said.stdout);
    }
    let repeat = "repeat: atoll lab run cfs-fig10 --seed 5 --runs 1 --quick";
    assert!(said.stdout.contains(repeat), "{}", said.stdout);
    for part in ["running cfs-fig10", "cfs-fig10 took "] {
        assert!(said.stderr.contains(part), "{part}: {}", said.stderr);
    }
    let points = fs::read_to_string(out.join("cfs-fig10.csv")).expect("points");
    assert!(points.starts_with("setting,") && points.lines().count() > 64);
    assert!(fs::read_to_string(out.join("cfs-fig10.svg")).expect("plot").starts_with("<svg"));
    let json = lab(true).json();
    assert_eq!(json["experiment"], "cfs-fig10");
    assert_eq!(json["seeds"], serde_json::json!([5]));
    assert!(json["rows"].as_array().is_some_and(|rows| rows.len() >= 4), "{json}");
    let again = fs::read_to_string(out.join("cfs-fig10.csv")).expect("points");
    assert_eq!(points, again, "the same seed gives the same points");
}

/// A run of all experiments takes an hour; what was found before it broke off must not be lost.
#[test]
fn an_experiment_is_written_down_before_the_next_one_runs() {
    let temp = tempfile::tempdir().expect("temp");
    let trace = temp.path().join("short.csv");
    fs::write(&trace, "host,start_s,end_s\n1,0,60\n2,0,60\n").expect("written");
    let mut command = atoll();
    command.args(["lab", "run", "cfs-fig10", "lookup-budget", "--quick", "--runs", "1"]);
    command.arg("--availability").arg(&trace).arg("--out").arg(temp.path());
    let said = run(&mut command).failed(2, &["the availability file covers 60 s"]);
    assert!(said.stdout.contains("points: "), "{}", said.stdout);
    assert!(temp.path().join("cfs-fig10.csv").exists());
    assert!(!temp.path().join("lookup-budget.csv").exists());
}

/// Each row: what is typed, the exit code, and words of the explanation.
#[test]
fn wrong_input_is_explained_before_anything_runs() {
    let temp = tempfile::tempdir().expect("temp");
    let text = |name: &str, content: &str| {
        let path = temp.path().join(name);
        fs::write(&path, content).expect("written");
        path.display().to_string()
    };
    let no_matrix = text("rtt", "1 2\n3\n");
    let no_trace = text("up.csv", "host,start_s,end_s\n1,9,3\n");
    let a_file = text("file", "");
    let below_a_file = format!("{a_file}/out");
    let absent = temp.path().join("absent").display().to_string();
    let closed = temp.path().join("closed");
    fs::create_dir(&closed).expect("made");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).expect("chmod");
    let table: &[(&[&str], i32, &[&str])] = &[
        (&[], 2, &["EXPERIMENT", "--all"]),
        (&["cfs-fig99"], 2, &["no experiment", "cfs-fig99", "atoll lab list"]),
        (&["cfs-fig9", "--all"], 2, &["cannot be used with"]),
        (&["cfs-fig9", "--nodes", "0"], 2, &["cfs-fig9", "16 to 65536", "not 0"]),
        (&["cfs-fig9", "--nodes", "99999999"], 2, &["16 to 65536"]),
        (&["cfs-fig9", "--nodes", "many"], 2, &["--nodes"]),
        (&["cfs-fig12", "--nodes", "9"], 2, &["the paper's"]),
        (&["cfs-fig9", "--runs", "0"], 2, &["1 to 1000 runs"]),
        (&["cfs-fig6", "--latency", &absent], 4, &["latencies", "absent", "No such file"]),
        (&["cfs-fig6", "--latency", &no_matrix], 1, &["not a latency matrix", "rtt"]),
        (&["cfs-fig9", "--availability", &no_trace], 1, &["line 2", "up.csv"]),
        (&["cfs-fig9", "--out", &below_a_file], 1, &["cannot write into"]),
    ];
    for (arguments, code, words) in table {
        let mut command = atoll();
        command.current_dir(temp.path()).args(["lab", "run"]).args(*arguments).arg("--quick");
        let said = run(&mut command).failed(*code, words);
        assert_eq!(said.stdout, "", "{arguments:?}");
    }
    assert!(!temp.path().join("atoll-lab").exists(), "nothing was run");
    // Root may write everywhere.
    let probe = closed.join("probe");
    if fs::write(&probe, "").is_err() {
        let out = closed.display().to_string();
        run(atoll().args(["lab", "run", "cfs-fig10", "--quick", "--out", &out]))
            .failed(1, &["cannot write into", "ermission"]);
    }
}
