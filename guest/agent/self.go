package agent

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

const (
	// SelfProgram is the link through which the guest's root finds this program.
	SelfProgram = "/run/drowse/agent"

	// selfTries and selfPause bound the dialling of a host that is not ready yet just after a wake.
	selfTries = 20
	selfPause = 100 * time.Millisecond
)

// ErrNotAllowed means that the host does not listen: the VM's owner has allowed no requests.
var ErrNotAllowed = errors.New("this VM may not ask its host for anything: its owner allows it with `drowse run --allow-self`")

// ErrInterrupted means that the connection ended before the answer came: the VM was asleep meanwhile, or this is a
// copy of it.
var ErrInterrupted = errors.New("the VM was asleep meanwhile, or this is a copy of it")

// AskHost asks the host for something about this machine.
func AskHost(r agentpb.SelfRequest) (a agentpb.SelfAnswer, err error) {
	line, err := json.Marshal(r)
	if err != nil {
		return a, err
	}
	var f *os.File
	for try := 1; ; try++ {
		err = again(1, func() (err error) {
			f, err = dialHost(agentpb.SelfPort, hostTimeoutSeconds)
			return err
		})
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ECONNRESET) || try == selfTries {
			if errors.Is(err, unix.ECONNRESET) {
				return a, ErrNotAllowed
			}
			return a, fmt.Errorf("ask the host: %w", err)
		}
		time.Sleep(selfPause)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		return a, fmt.Errorf("ask the host: %w", err)
	}
	text, err := bufio.NewReader(io.LimitReader(f, agentpb.MaxSelfAnswer)).ReadBytes('\n')
	if err != nil {
		return a, fmt.Errorf("ask the host: %w: %w", ErrInterrupted, err)
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return a, fmt.Errorf("ask the host: its answer: %w", err)
	}
	if !a.OK {
		return a, fmt.Errorf("the host: %s", a.Error)
	}
	return a, nil
}

// LinkSelf puts a link to this program at SelfProgram.
func LinkSelf() error {
	if err := os.MkdirAll(filepath.Dir(SelfProgram), 0o755); err != nil {
		return err
	}
	// An earlier agent may have left its link.
	if err := os.Remove(SelfProgram); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink("/proc/"+strconv.Itoa(os.Getpid())+"/exe", SelfProgram)
}
