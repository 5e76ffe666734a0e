package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progress shows the stages of long work on stderr: as bars on a terminal, and otherwise as one line for each
// stage. Any goroutine may call its methods.
type progress struct {
	what string        // the work: "kernel build"
	log  io.Writer     // lines between the bars, or one for each stage
	bars *mpb.Progress // nil when stderr is no terminal

	mu    sync.Mutex // guards the rest
	stage string
	bar   *mpb.Bar
	total int64
	ended bool
}

// stageCopy is the stage of a copy. inBytes are the stages that count bytes.
const stageCopy = "copy"

var inBytes = []string{"download", "read", "write", "hash", "capture", stageCopy}

// newProgress begins to show progress. The caller must call finish.
func (a *app) newProgress(what string) *progress {
	p := &progress{what: what, log: a.stderr}
	if hasWidth(a.stderr) {
		p.bars = mpb.New(mpb.WithOutput(raw(a.stderr)))
		p.log = &screen{w: p.bars}
	}
	return p
}

// hasWidth reports whether w is a terminal that can show bars: some have no columns.
func hasWidth(w io.Writer) bool {
	f, ok := raw(w).(*os.File)
	if !ok || !isTerminal(f) {
		return false
	}
	cols, _, err := term.GetSize(int(f.Fd()))
	return err == nil && cols > 0
}

// toolLog returns the writer for messages of build tools: none, unless the user wants more output.
func (p *progress) toolLog(a *app) io.Writer {
	if !a.verbose {
		return nil
	}
	return p.log
}

// newer tells the user of a newer kernel than the one found.
func (p *progress) newer(version string) {
	fmt.Fprintf(p.log, "a newer kernel is there: %s (take it with: drowse %s --update)\n", version, p.what)
}

// report is a callback for packages kernel and image. total is 0 if it is unknown.
func (p *progress) report(stage string, done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	if stage != p.stage {
		p.end(true)
		p.stage = stage
		p.begin(total)
	}
	if p.bar == nil {
		return
	}
	if total != p.total && total > 0 {
		p.total = total
		p.bar.SetTotal(total, false)
	}
	p.bar.SetCurrent(done)
}

// begin shows that a stage has begun. The caller holds mu.
func (p *progress) begin(total int64) {
	if p.bars == nil {
		fmt.Fprintf(p.log, "%s: %s\n", p.what, p.stage)
		return
	}
	p.total = total
	name := decor.Name(printable(p.what+": "+p.stage), decor.WCSyncSpaceR)
	count := decor.CountersNoUnit("%d / %d", decor.WCSyncSpace)
	known, bytes := total > 0, slices.Contains(inBytes, p.stage)
	switch {
	case bytes && known:
		count = decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace)
	case bytes:
		count = decor.CurrentKibiByte("% .1f", decor.WCSyncSpace)
	case !known:
		count = decor.Name("")
	}
	elapsed := decor.Elapsed(decor.ET_STYLE_GO, decor.WCSyncSpace)
	// A bar with a total closes itself on reaching it, although the total may grow and the stage continue. So the
	// bar gets its total later.
	if known {
		p.bar = p.bars.AddBar(0, mpb.PrependDecorators(name), mpb.AppendDecorators(count, elapsed))
		p.bar.SetTotal(total, false)
		return
	}
	p.bar = p.bars.AddSpinner(0, mpb.PrependDecorators(name), mpb.AppendDecorators(count, elapsed))
}

// end closes the bar of the stage. The caller holds mu.
func (p *progress) end(done bool) {
	if p.bar == nil {
		return
	}
	if done {
		p.bar.SetTotal(-1, true) // the count so far is the total
	} else {
		p.bar.Abort(false)
	}
	p.bar = nil
}

// finish ends the display. err is the result of the work.
func (p *progress) finish(err error) {
	p.mu.Lock()
	p.end(err == nil)
	p.ended = true
	p.mu.Unlock()
	if p.bars != nil {
		p.bars.Wait()
	}
}
