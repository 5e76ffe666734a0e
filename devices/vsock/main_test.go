package vsock

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The drivers of the tests answer quickly or never.
	requestTimeout, ackTimeout = 10*time.Second, 2*time.Second
	goleak.VerifyTestMain(m)
}
