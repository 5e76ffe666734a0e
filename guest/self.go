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

// SelfRequest is a guest's request about its own VM.
type SelfRequest = agentpb.SelfRequest

// SelfAnswer is the host's answer.
type SelfAnswer = agentpb.SelfAnswer

// Requests that a guest may make.
const (
	SelfSleep    = agentpb.SelfSleep
	SelfSnapshot = agentpb.SelfSnapshot
	SelfHold     = agentpb.SelfHold
	SelfWake     = agentpb.SelfWake
	SelfExtend   = agentpb.SelfExtend
	SelfFork     = agentpb.SelfFork
)

// SelfPath returns the path of the host's socket for a guest's requests. path is the Unix socket of the vsock
// device.
func SelfPath(path string) string { return HostPath(path, agentpb.SelfPort) }

// HostPath returns the path of the host's socket for the guest's connections to a port of the host. path is the Unix
// socket of the vsock device.
func HostPath(path string, port uint32) string {
	return path + "_" + strconv.FormatUint(uint64(port), 10)
}

const (
	// selfTimeout bounds reading a request, writing an answer, and waiting until the guest has read it.
	selfTimeout = 5 * time.Second
	// maxSelfLeft bounds what a guest may still send after its request, in bytes.
	maxSelfLeft = 1 << 10
)

// ServeSelf answers requests of the guest, until the listener is closed. do carries out a request. It may return a
// function then, which runs once the guest has its answer. ServeSelf serves one connection at a time, so a guest can
// hold up only itself. It answers a malformed request with an error.
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
	a.Error = a.Error[:min(len(a.Error), agentpb.MaxSelfAnswer/8)] // JSON may need six bytes for one
	text, err := json.Marshal(a)
	if err != nil || c.SetDeadline(time.Now().Add(selfTimeout)) != nil {
		return then
	}
	if _, err := c.Write(append(text, '\n')); err == nil {
		// The guest's end of the connection confirms the answer, which a sleep would lose.
		_, _ = io.CopyN(io.Discard, c, maxSelfLeft)
	}
	return then
}
