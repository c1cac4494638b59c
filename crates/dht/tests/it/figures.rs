//! Figures of the paper that a change must not spoil. `atoll lab run cfs-fig9` draws
//! this one whole.

use atoll_sim::{Sim, SimConfig};

use crate::perfect::calls_per_lookup;

/// CFS §7.2, Figure 9: a lookup takes about ½·log2 N calls.
#[test]
fn a_lookup_takes_at_most_half_log2_n_calls_on_average() {
    for nodes in [16usize, 256] {
        let sim = Sim::new(SimConfig { seed: 9, ..SimConfig::default() });
        let calls = calls_per_lookup(&sim, nodes, 1000);
        let mean = calls.iter().sum::<usize>() as f64 / calls.len() as f64;
        let paper = 0.5 * (nodes as f64).log2();
        assert!(mean <= paper, "{nodes} nodes: {mean} calls, the paper has {paper}");
        assert!(calls[calls.len() - 1] <= 10, "CFS: essentially never above 10");
        sim.shut_down();
    }
}
