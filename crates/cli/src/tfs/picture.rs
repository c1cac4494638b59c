//! Pictures of where blocks lie, as the paper's Figure 10: in a terminal, as SVG, as PNG.
//!
//! A cell of the map has a colour mixed of those of its blocks: ordinary data blue,
//! transparent data orange, overwritten blocks red, free ones pale. Colours are those of
//! Okabe and Ito, which people who see few colours tell apart. Without colours a letter says
//! what most of a cell's blocks are.

use std::fmt::Write as _;

use atoll_tfs::ext2::StateCounts;
use atoll_tfs::map::BlockMap;

/// Pixels of a cell's side in a picture.
const CELL_PX: usize = 8;
/// Cells of a row in a picture.
pub(super) const PICTURE_COLUMNS: usize = 128;
/// Rows of cells in a picture.
pub(super) const PICTURE_ROWS: usize = 64;
/// Room for the legend below, pixels.
const LEGEND_PX: usize = 40;

/// What the map tells apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Ordinary,
    Transparent,
    Overwritten,
    Free,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Ordinary, Kind::Transparent, Kind::Overwritten, Kind::Free];

    fn name(self) -> &'static str {
        match self {
            Kind::Ordinary => "ordinary",
            Kind::Transparent => "transparent",
            Kind::Overwritten => "overwritten",
            Kind::Free => "free",
        }
    }

    fn letter(self) -> char {
        match self {
            Kind::Ordinary => 'O',
            Kind::Transparent => 't',
            Kind::Overwritten => 'x',
            Kind::Free => '.',
        }
    }

    fn colour(self) -> [u8; 3] {
        match self {
            Kind::Ordinary => [0, 114, 178],
            Kind::Transparent => [230, 159, 0],
            Kind::Overwritten => [190, 30, 30],
            Kind::Free => [238, 238, 238],
        }
    }

    fn blocks(self, cell: &StateCounts) -> u64 {
        match self {
            Kind::Ordinary => cell.allocated,
            Kind::Transparent => cell.transparent,
            Kind::Overwritten => cell.overwritten(),
            Kind::Free => cell.free,
        }
    }
}

/// The colour of a cell: its blocks' mixed.
fn mixed(cell: &StateCounts) -> [u8; 3] {
    let all: u64 = Kind::ALL.iter().map(|kind| kind.blocks(cell)).sum();
    std::array::from_fn(|channel| {
        let part = |kind: Kind| kind.blocks(cell) * u64::from(kind.colour()[channel]);
        let sum: u64 = Kind::ALL.into_iter().map(part).sum();
        u8::try_from(sum / all.max(1)).unwrap_or(u8::MAX)
    })
}

/// The letter of a cell: what most of its blocks are; of equally many the first.
fn letter(cell: &StateCounts) -> char {
    let mut most = Kind::Free;
    for kind in Kind::ALL.into_iter().rev() {
        if kind.blocks(cell) >= most.blocks(cell) {
            most = kind;
        }
    }
    most.letter()
}

/// How much of the disk is of which kind: `ordinary 12 %`.
fn shares(map: &BlockMap) -> Vec<(Kind, String)> {
    let totals = map.totals();
    let share = |kind: Kind| {
        let percent = kind.blocks(&totals) as f64 * 100.0 / map.blocks.max(1) as f64;
        (kind, format!("{} {percent:.1} %", kind.name()))
    };
    Kind::ALL.into_iter().map(share).collect()
}

/// Cells that a terminal of this size shows: two in each place with colours, for half
/// blocks, else one. Two lines are left for the legend and the prompt.
pub(super) fn terminal_cells(columns: usize, rows: usize, colours: bool) -> u32 {
    let lines = rows.saturating_sub(3).max(1) * if colours { 2 } else { 1 };
    u32::try_from(columns.max(1) * lines).unwrap_or(u32::MAX)
}

/// The map for a terminal of so many columns.
pub(super) fn terminal(map: &BlockMap, columns: usize, colours: bool) -> String {
    let columns = columns.max(1);
    let mut text = String::new();
    if colours {
        draw_half_blocks(&mut text, map, columns);
    } else {
        for row in map.cells.chunks(columns) {
            text.extend(row.iter().map(letter));
            text.push('\n');
        }
    }
    let legend: Vec<String> = shares(map)
        .into_iter()
        .map(|(kind, share)| {
            let [r, g, b] = kind.colour();
            match colours {
                true => format!("\x1b[38;2;{r};{g};{b}m█\x1b[0m {share}"),
                false => format!("{} {share}", kind.letter()),
            }
        })
        .collect();
    // Colours take no room on the terminal: the words without them say what fits.
    let width: usize = shares(map).iter().map(|(_, share)| share.len() + 2).sum();
    let fits = width + 3 * (legend.len() - 1) <= columns;
    text.push_str(&legend.join(if fits { "   " } else { "\n" }));
    text.push('\n');
    text
}

/// Two rows of cells in a line: the upper is the colour of `▀`, the lower the ground's.
fn draw_half_blocks(text: &mut String, map: &BlockMap, columns: usize) {
    for rows in map.cells.chunks(2 * columns) {
        let (upper, lower) = rows.split_at(columns.min(rows.len()));
        let mut before = None;
        for (i, cell) in upper.iter().enumerate() {
            let colours = (mixed(cell), lower.get(i).map(mixed));
            if before != Some(colours) {
                let [r, g, b] = colours.0;
                let _ = write!(text, "\x1b[38;2;{r};{g};{b}m");
                match colours.1 {
                    Some([r, g, b]) => {
                        let _ = write!(text, "\x1b[48;2;{r};{g};{b}m");
                    }
                    None => text.push_str("\x1b[49m"),
                }
                before = Some(colours);
            }
            text.push('▀');
        }
        text.push_str("\x1b[0m\n");
    }
}

/// The map as SVG: runs of cells of one colour are one rectangle.
pub(super) fn svg(map: &BlockMap) -> String {
    let width = PICTURE_COLUMNS * CELL_PX;
    let rows = map.cells.len().div_ceil(PICTURE_COLUMNS);
    let height = rows * CELL_PX + LEGEND_PX;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n<rect width=\"{width}\" height=\"{height}\" \
         fill=\"#ffffff\"/>\n"
    );
    for (row, cells) in map.cells.chunks(PICTURE_COLUMNS).enumerate() {
        let mut at = 0;
        for run in cells.chunk_by(|a, b| mixed(a) == mixed(b)) {
            let [r, g, b] = mixed(&run[0]);
            let (x, y, len) = (at * CELL_PX, row * CELL_PX, run.len() * CELL_PX);
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{len}\" height=\"{CELL_PX}\" \
                 fill=\"#{r:02x}{g:02x}{b:02x}\"/>"
            );
            at += run.len();
        }
    }
    let baseline = height - LEGEND_PX / 2 + 5;
    for (i, (kind, share)) in shares(map).into_iter().enumerate() {
        let [r, g, b] = kind.colour();
        let (x, y) = (8 + i * width / Kind::ALL.len(), baseline - 12);
        let text_x = x + 22;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" stroke=\"#888888\" \
             fill=\"#{r:02x}{g:02x}{b:02x}\"/>\n<text x=\"{text_x}\" y=\"{baseline}\" \
             font-family=\"Helvetica, Arial, sans-serif\" font-size=\"15\" \
             fill=\"#1e1e1e\">{share}</text>"
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The map as PNG, without a legend.
pub(super) fn png(map: &BlockMap) -> Vec<u8> {
    let rows = map.cells.len().div_ceil(PICTURE_COLUMNS);
    let (width, height) = (PICTURE_COLUMNS * CELL_PX, rows * CELL_PX);
    let mut pixels = Vec::with_capacity(height * 3 * width);
    for cells in map.cells.chunks(PICTURE_COLUMNS) {
        let mut line = Vec::new();
        for column in 0..PICTURE_COLUMNS {
            let colour = cells.get(column).map_or([255; 3], mixed);
            line.extend(std::iter::repeat_n(colour, CELL_PX).flatten());
        }
        pixels.extend(std::iter::repeat_n(&line, CELL_PX).flatten());
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().expect("a map has cells, and memory takes all bytes");
    writer.write_image_data(&pixels).expect("there are as many pixels as the header says");
    writer.finish().expect("memory takes all bytes");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> BlockMap {
        let cell = |allocated, transparent, overwritten, free| StateCounts {
            allocated,
            transparent,
            free_and_overwritten: overwritten,
            free,
            ..StateCounts::default()
        };
        let cells = vec![
            cell(4, 0, 0, 0),
            cell(1, 3, 0, 0),
            cell(0, 1, 2, 1),
            cell(0, 0, 0, 4),
            cell(2, 0, 0, 2),
        ];
        BlockMap { block_bytes: 4096, blocks: 20, cell_blocks: 4, cells }
    }

    #[test]
    fn letters_say_what_most_blocks_of_a_cell_are() {
        let text = terminal(&sample(), 3, false);
        let legend = "O ordinary 35.0 %   t transparent 20.0 %   x overwritten 10.0 %   \
                      . free 35.0 %\n";
        assert_eq!(text, format!("Otx\n.O\n{}", legend.replace("   ", "\n")), "it is narrow");
        assert_eq!(terminal(&sample(), legend.len(), false), format!("Otx.O\n{legend}"));
    }

    #[test]
    fn half_blocks_show_two_rows_in_a_line() {
        let text = terminal(&sample(), 3, true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + Kind::ALL.len(), "the cells and the legend");
        assert_eq!(lines[0].matches('▀').count(), 3);
        assert!(lines[0].starts_with("\x1b[38;2;0;114;178m\x1b[48;2;238;238;238m▀"));
        assert!(lines[0].contains("\x1b[49m▀"), "nothing below the last");
        assert!(lines.iter().all(|line| line.ends_with("\x1b[0m") || line.ends_with('%')));
        assert_eq!(terminal_cells(80, 24, true), 80 * 42);
        assert_eq!(terminal_cells(80, 24, false), 80 * 21);
        assert_eq!(terminal_cells(0, 0, false), 1);
    }

    #[test]
    fn colours_are_mixed_by_blocks() {
        let map = sample();
        assert_eq!(mixed(&map.cells[0]), Kind::Ordinary.colour());
        assert_eq!(mixed(&map.cells[4]), [119, 176, 208]);
        assert_eq!(mixed(&StateCounts::default()), [0; 3]);
    }

    #[test]
    fn pictures_have_a_place_for_each_cell() {
        let map = sample();
        let svg = svg(&map);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("height=\"8\"").count(), map.cells.len(), "no two are alike");
        assert!(svg.contains("transparent 20.0 %"));
        let png = png(&map);
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&png[16..24], [0, 0, 4, 0, 0, 0, 0, 8], "1024 pixels by 8");
    }
}
