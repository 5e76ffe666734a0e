package jailproofs

import (
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

func TestMain(m *testing.M) { guesttest.Main(m) }
