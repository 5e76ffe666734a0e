package guest

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SelfRequest is what a guest asks for about its own VM.
type SelfRequest = agentpb.SelfRequest

// SelfAnswer is what it is told.
type SelfAnswer = agentpb.SelfAnswer

// What a guest may ask for.
const (
	SelfSleep    = agentpb.SelfSleep
	SelfSnapshot = agentpb.SelfSnapshot
	SelfHold     = agentpb.SelfHold
	SelfWake     = agentpb.SelfWake
	SelfExtend   = agentpb.SelfExtend
	SelfFork     = agentpb.SelfFork
)

// SelfPath is where the host listens for what a guest asks for, given the path of the Unix socket that
// stands for the vsock device.
func SelfPath(path string) string { return path + "_" + strconv.Itoa(agentpb.SelfPort) }

const (
	// selfTimeout bounds the reading of a request, the writing of an answer, and the wait for the guest to
	// have taken it.
	selfTimeout = 5 * time.Second
	// maxSelfLeft bounds what a guest may still say after its request, in bytes.
	maxSelfLeft = 1 << 10
)

// ServeSelf answers requests of the guest, until the listener is closed. do does what is asked for, and may
// return what is to be done when the guest has had its answer. One connection is served at a time, so a
// guest can hold up only itself. What is no request is answered with what is wrong with it.
func ServeSelf(l net.Listener, do func(SelfRequest) (answer SelfAnswer, then func())) {
	serveEach(l, selfTimeout, func(c net.Conn) {
		then := serveSelf(c, do)
		c.Close()
		if then != nil {
			then()
		}
	})
}

func serveSelf(c net.Conn, do func(SelfRequest) (SelfAnswer, func())) (then func()) {
	line, err := bufio.NewReaderSize(io.LimitReader(c, agentpb.MaxSelfRequest+1), agentpb.MaxSelfRequest+1).ReadSlice('\n')
	if err != nil {
		return nil
	}
	var a SelfAnswer
	r, err := agentpb.ParseSelfRequest(line[:len(line)-1])
	if err != nil {
		a.Error = err.Error()
	} else {
		a, then = do(r)
	}
	a.Error = a.Error[:min(len(a.Error), agentpb.MaxSelfAnswer/8)] // JSON may make six of one byte
	text, err := json.Marshal(a)
	if err != nil || c.SetDeadline(time.Now().Add(selfTimeout)) != nil {
		return then
	}
	if _, err := c.Write(append(text, '\n')); err == nil {
		// Its end says that the guest has the answer: a sleep would take it away.
		_, _ = io.CopyN(io.Discard, c, maxSelfLeft)
	}
	return then
}
