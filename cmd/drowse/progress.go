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

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox/build"
)

// progress shows the stages of long work on stderr: as bars when that is a terminal,
// else as one line for each stage. Its methods may be called from any goroutine.
type progress struct {
	what string        // what is being done: "kernel build"
	log  io.Writer     // lines between the bars, or of stages
	bars *mpb.Progress // nil when stderr is no terminal

	mu    sync.Mutex // guards the rest
	stage string
	bar   *mpb.Bar
	total int64
	ended bool
}

// stageCopy is that of a copy, and inBytes are all stages that count bytes: others count something else, or nothing.
const stageCopy = "copy"

var inBytes = []string{image.StageDownload, image.StageRead, image.StageWrite, image.StageHash, build.StageCapture, stageCopy}

// newProgress begins to show work. finish must be called.
func (a *app) newProgress(what string) *progress {
	p := &progress{what: what, log: a.stderr}
	if hasWidth(a.stderr) {
		p.bars = mpb.New(mpb.WithOutput(raw(a.stderr)))
		p.log = &screen{w: p.bars}
	}
	return p
}

// hasWidth says that w is a terminal that bars can be drawn on: some have no columns.
func hasWidth(w io.Writer) bool {
	f, ok := raw(w).(*os.File)
	if !ok || !isTerminal(f) {
		return false
	}
	cols, _, err := term.GetSize(int(f.Fd()))
	return err == nil && cols > 0
}

// toolLog is where the messages of build tools go: nowhere, unless the user wants to
// read more.
func (p *progress) toolLog(a *app) io.Writer {
	if !a.verbose {
		return nil
	}
	return p.log
}

// newer says that the kernel that was found is not the newest.
func (p *progress) newer(version string) {
	fmt.Fprintf(p.log, "a newer kernel is there: %s (take it with: drowse %s --update)\n", version, p.what)
}

// report is a callback as packages kernel and image take it. total is 0 when it is
// not known.
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

// begin shows that a stage has begun. The lock is held.
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
	// A bar with a total closes itself when that is reached, though the total may grow
	// and the stage go on: it gets its total later.
	if known {
		p.bar = p.bars.AddBar(0, mpb.PrependDecorators(name), mpb.AppendDecorators(count, elapsed))
		p.bar.SetTotal(total, false)
		return
	}
	p.bar = p.bars.AddSpinner(0, mpb.PrependDecorators(name), mpb.AppendDecorators(count, elapsed))
}

// end closes the bar of the stage. The lock is held.
func (p *progress) end(done bool) {
	if p.bar == nil {
		return
	}
	if done {
		p.bar.SetTotal(-1, true) // what has been counted was all
	} else {
		p.bar.Abort(false)
	}
	p.bar = nil
}

// finish ends the showing; err is how the work has ended.
func (p *progress) finish(err error) {
	p.mu.Lock()
	p.end(err == nil)
	p.ended = true
	p.mu.Unlock()
	if p.bars != nil {
		p.bars.Wait()
	}
}
