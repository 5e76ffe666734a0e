package page

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

var update = flag.Bool("update", false, "write the golden files anew")

// render makes a page of files.
func render(t *testing.T, files ...string) string {
	t.Helper()
	var p Page
	for _, name := range files {
		f, err := os.Open(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := p.Add(name, f); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	if err := p.HTML(&out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestHTML_report_gives_golden_page(t *testing.T) {
	for golden, files := range map[string][]string{"report.html": {"report.json"}, "both.html": {"report.json", "odd.json"}} {
		got := render(t, files...)
		golden = filepath.Join("testdata", golden)
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s is not what it was: look at what `go test ./bench/page -update` changes", golden)
		}
		check(t, got)
	}
}

func TestHTML_report_gives_each_kind_of_chart(t *testing.T) {
	got := render(t, "report.json")
	for _, want := range []string{
		"Beside other monitors", "Distributions", "By size of RAM", "Stages", "All rows",
		"Example &lt;b&gt;CPU&lt;/b&gt;", "0123456789abcdef", "not measured: not on PATH", "10.5 to 11.5", "20 runs", "qemu", "81.25",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	// Nothing differs in depth, and nothing that is missing is drawn.
	for _, no := range []string{"By depth", "firecracker: 0", "NaN"} {
		if strings.Contains(got, no) {
			t.Errorf("the page has %q", no)
		}
	}
}

func TestHTML_odd_input_gives_notes_and_no_markup(t *testing.T) {
	got := render(t, "odd.json")
	for _, want := range []string{
		"&lt;script&gt;alert(1)", "row 5 is left out", "row 6 is left out", "not measured: &lt;b&gt;why", "its histogram is left out: pair 2",
		"report 1, machine: what should be an object is none", "(no name)", "commit</th><td>unknown",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if strings.ContainsRune(got, '\u202e') {
		t.Error("text of the page runs backwards")
	}
}

func TestAdd_what_is_no_report_gives_ErrInput(t *testing.T) {
	tests := map[string]string{
		"empty": "", "no JSON": "x", "cut short": `{"rows": [`, "another document": `{"pid": 1}`, "a list": `[]`, "null": `null`,
		"rows are none": `{"rows": 7}`, "rubbish after": `{"rows": []} x`,
		"too many": strings.Repeat(`{"rows": []}`, MaxReports+1),
	}
	for name, in := range tests {
		var p Page
		if err := p.Add("file", strings.NewReader(in)); !errors.Is(err, ErrInput) {
			t.Errorf("%s: %v, want ErrInput", name, err)
		}
	}
	var p Page
	if err := p.Add("file", spaces{}); !errors.Is(err, ErrInput) || !strings.Contains(err.Error(), "64 MiB") {
		t.Errorf("endless input: %v", err)
	}
}

type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestAdd_more_than_the_bounds_gives_notes(t *testing.T) {
	var p Page
	rows := strings.Repeat(`{"name": "x", "p50": -1, "unit": "ms", "stages": {"s": 1}},`, MaxRows+1)
	if err := p.Add("file", strings.NewReader(`{"rows": [`+strings.TrimSuffix(rows, ",")+`]}`)); err != nil {
		t.Fatal(err)
	}
	if len(p.rows) != MaxRows || len(p.notes) != maxNotes+1 {
		t.Errorf("%d rows and %d notes", len(p.rows), len(p.notes))
	}
	var out bytes.Buffer
	if err := p.HTML(&out); err != nil {
		t.Fatal(err)
	}
	check(t, out.String())
	if n := strings.Count(out.String(), "<figure>"); n != maxCharts {
		t.Errorf("%d charts, want %d", n, maxCharts)
	}
	if !strings.Contains(out.String(), "Stages: 4880 charts are left out") {
		t.Error("nothing says that charts are left out")
	}
}

func TestAxis_values_give_places_within_and_few_ticks(t *testing.T) {
	for _, values := range [][]float64{{0}, {5}, {0, 1}, {minNumber, maxNumber}, {maxNumber}, {1, 20}, {1, 21}, {0.3, 9000}, {7, 7}, {minNumber}} {
		a := newAxis(values, 20, 10, 110)
		ticks := a.ticks()
		if len(ticks) > 40 {
			t.Errorf("%v: %d ticks", values, len(ticks))
		}
		for _, v := range append(ticks, values...) {
			if at := a.at(v); !(at >= 10 && at <= 110) {
				t.Errorf("%v: %v is at %v", values, v, at)
			}
		}
	}
}

var (
	tags = []string{
		"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tbody", "tr", "th", "td", "ul", "li", "div", "figure", "figcaption",
		"details", "summary", "svg", "line", "rect", "polyline", "text",
	}
	attributes = []string{
		"lang", "charset", "http-equiv", "content", "name", "class", "viewbox", "role", "aria-labelledby", "aria-hidden", "id", "x", "y", "x1", "y1", "x2", "y2",
		"width", "height", "fill", "stroke", "stroke-dasharray", "points", "text-anchor", "colspan",
	}
	numbers = regexp.MustCompile(`^-?[0-9.]+$`)
)

// check fails if a page has an element or an attribute that the template has not, a
// reference to anything, or a place that is no number.
func check(t *testing.T, page string) {
	t.Helper()
	z := html.NewTokenizer(strings.NewReader(page))
	var open []string
	for {
		kind := z.Next()
		if kind == html.ErrorToken {
			if z.Err() != io.EOF {
				t.Fatal(z.Err())
			}
			break
		}
		token := z.Token()
		switch kind {
		case html.EndTagToken:
			if len(open) == 0 || open[len(open)-1] != token.Data {
				t.Fatalf("</%s> ends what is open: %v", token.Data, open)
			}
			open = open[:len(open)-1]
		case html.StartTagToken, html.SelfClosingTagToken:
			if !slices.Contains(tags, token.Data) {
				t.Fatalf("the page has a <%s>", token.Data)
			}
			if kind == html.StartTagToken && token.Data != "meta" {
				open = append(open, token.Data)
			}
			for _, a := range token.Attr {
				if !slices.Contains(attributes, a.Key) {
					t.Fatalf("<%s> has the attribute %s", token.Data, a.Key)
				}
				switch a.Key {
				case "x", "y", "x1", "x2", "y1", "y2":
					if !numbers.MatchString(a.Val) {
						t.Fatalf("%s of <%s> is %q", a.Key, token.Data, a.Val)
					}
				case "points":
					if strings.ContainsAny(a.Val, "NIe+") {
						t.Fatalf("points are %q", a.Val)
					}
				}
			}
		case html.CommentToken:
			t.Fatalf("the page has a comment: %q", token.Data)
		}
	}
	if len(open) > 0 {
		t.Fatalf("not closed: %v", open)
	}
}

// FuzzHTML: whatever is read, the page is one of its template's elements alone.
func FuzzHTML(f *testing.F) {
	for _, name := range []string{"report.json", "odd.json"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"rows":[{"name":"x","unit":"ms","p50":1,"p99":1e-300,"params":{"depth":1e-12,"peer":"q"},"histogram":[[1e-12,1],[1e15,1e15]]},{"name":"x","unit":"ms","p50":1e15,"params":{"depth":1e15,"peer":"q"}}]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var p Page
		if err := p.Add("file", bytes.NewReader(in)); err != nil && !errors.Is(err, ErrInput) {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := p.HTML(&out); err != nil {
			t.Fatal(err)
		}
		check(t, out.String())
	})
}
