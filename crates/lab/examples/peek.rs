//! tmp
fn main() {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let quick = names.iter().any(|n| n == "quick");
    let names: Vec<&str> = names.iter().map(|s| &**s).filter(|s| *s != "quick").collect();
    let o = atoll_lab::Options { quick, ..Default::default() };
    let t = std::time::Instant::now();
    for out in atoll_lab::run(&names, &o, &atoll_lab::Silent).unwrap() {
        println!("{}\n{}\n{}\n{:?}", out.title, out.setup, out.table(), out.notes);
        std::fs::create_dir_all("/tmp/lab").unwrap();
        std::fs::write(format!("/tmp/lab/{}.svg", out.name), out.chart.to_svg()).unwrap();
        std::fs::write(format!("/tmp/lab/{}.csv", out.name), out.csv.text()).unwrap();
    }
    println!("{:?}", t.elapsed());
}
