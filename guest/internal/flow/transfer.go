package flow

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Transfer is the guest's end of a Transfer stream: an io.ReadWriter of what the host sends and gets.
type Transfer struct {
	// Context ends with the stream, or with End.
	Context context.Context
	stream  agentpb.Agent_TransferServer
	cancel  context.CancelCauseFunc
	window  Window
	acker   Acker

	data chan []byte   // received and not yet consumed, within a window
	end  chan struct{} // closed when the host has sent everything
	rest []byte        // of the message being read
}

// ErrEnded says that the host has sent all that it sends.
var ErrEnded = errors.New("the session has ended")

// Accept takes the first message of a Transfer stream, and receives those that follow until End is called.
func Accept(ctx context.Context, stream agentpb.Agent_TransferServer) (t *Transfer, first *agentpb.TransferRequest, err error) {
	if first, err = stream.Recv(); err != nil {
		return nil, nil, err
	}
	t = &Transfer{stream: stream, data: make(chan []byte, agentpb.Window), end: make(chan struct{})}
	t.Context, t.cancel = context.WithCancelCause(ctx)
	go func() { t.cancel(t.receive()) }()
	return t, first, nil
}

// End ends the transfer's context.
func (t *Transfer) End() { t.cancel(ErrEnded) }

// Info tells the host what is transferred.
func (t *Transfer) Info(info *agentpb.FileInfo) error {
	return t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Info{Info: info}})
}

// Done tells the host that all of it was transferred.
func (t *Transfer) Done(done *agentpb.TransferDone) error {
	return t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: done}})
}

// receive handles what the host sends. It always returns an error.
func (t *Transfer) receive() error {
	ended := false
	for {
		m, err := t.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = ErrEnded
			}
			return err
		}
		switch m := m.Msg.(type) {
		case *agentpb.TransferRequest_Ack:
			if err := t.window.Ack(m.Ack); err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
		case *agentpb.TransferRequest_Data:
			select {
			case t.data <- m.Data:
			default:
				return status.Errorf(codes.ResourceExhausted, "more than %d data messages unacknowledged", agentpb.Window)
			}
		case *agentpb.TransferRequest_End:
			if !ended {
				ended = true
				close(t.end)
			}
		default:
			return status.Errorf(codes.InvalidArgument, "unexpected message %T in a transfer", m)
		}
	}
}

// Write sends p as data messages.
func (t *Transfer) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		n := min(len(p)-sent, agentpb.MaxChunk)
		if _, err := t.window.Acquire(t.Context); err != nil {
			return sent, err
		}
		err := t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: p[sent : sent+n]}})
		if err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

// Read returns the data that the host sends, io.EOF after its end message.
func (t *Transfer) Read(p []byte) (int, error) {
	for len(t.rest) == 0 {
		data, err := t.next()
		if err != nil {
			return 0, err
		}
		t.rest = data
		if n, due := t.acker.Consumed(len(data)); due {
			if err := t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Ack{Ack: n}}); err != nil {
				return 0, err
			}
		}
	}
	n := copy(p, t.rest)
	t.rest = t.rest[n:]
	return n, nil
}

func (t *Transfer) next() ([]byte, error) {
	select {
	case data := <-t.data:
		return data, nil
	default:
	}
	select {
	case data := <-t.data:
		return data, nil
	case <-t.end:
		select { // data that came before the end message
		case data := <-t.data:
			return data, nil
		default:
			return nil, io.EOF
		}
	case <-t.Context.Done():
		return nil, t.Context.Err()
	}
}
