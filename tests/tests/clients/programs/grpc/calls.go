// Unary calls of grpc-go with the retry policy of a service config: calls ADDRESS calls COUNT | calls ADDRESS refusals
//
// Messages are bytes, so nothing is generated. Each line of the output is the outcome of one call.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const workers = 8

const service = "/payments.v1.Payments/"

// The policy retries more codes than it should. The pushback of an error that is final prevents these retries.
const config = `{"methodConfig": [{"name": [{"service": "payments.v1.Payments"}], "retryPolicy": {
	"maxAttempts": 5, "initialBackoff": "0.02s", "maxBackoff": "0.5s", "backoffMultiplier": 2,
	"retryableStatusCodes": ["UNAVAILABLE", "FAILED_PRECONDITION", "INVALID_ARGUMENT"]}}]}`

type bytesCodec struct{}

func (bytesCodec) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }

func (bytesCodec) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte{}, data...)
	return nil
}

func (bytesCodec) Name() string { return "proto" }

var output sync.Mutex

func report(name string, code int, body string) {
	output.Lock()
	defer output.Unlock()
	line, _ := json.Marshal(map[string]interface{}{"name": name, "status": code, "body": body})
	fmt.Println(string(line))
}

func payment(account string, amount byte) []byte {
	return append(append([]byte{0x0a, byte(len(account))}, account...), 0x10, amount)
}

func withKey(key string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	if key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "idempotency-key", key)
	}
	return ctx, cancel
}

var reason = regexp.MustCompile("IDEMPOTENCY_[A-Z_]+")

func pay(conn *grpc.ClientConn, key string, message []byte) (codes.Code, string) {
	ctx, cancel := withKey(key)
	defer cancel()
	var reply []byte
	err := conn.Invoke(ctx, service+"Pay", &message, &reply)
	if err == nil {
		return codes.OK, hex.EncodeToString(reply)
	}
	body := status.Convert(err).Message()
	for _, details := range status.Convert(err).Proto().GetDetails() {
		if found := reason.Find(details.GetValue()); found != nil {
			body = string(found)
		}
	}
	return status.Code(err), body
}

func one(conn *grpc.ClientConn, name, key string, message []byte) {
	code, body := pay(conn, key, message)
	report(name, int(code), body)
}

// A call whose attempts are used up is made again with its key, as an application would.
func calls(conn *grpc.ClientConn, count int) {
	var group sync.WaitGroup
	var lock sync.Mutex
	next, again := 0, 0
	take := func() (int, bool) {
		lock.Lock()
		defer lock.Unlock()
		next++
		return next, next <= count
	}
	for worker := 0; worker < workers; worker++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for call, is_left := take(); is_left; call, is_left = take() {
				name := fmt.Sprintf("call-%d", call)
				code, body := pay(conn, name, payment(name, 5))
				for code == codes.Unavailable {
					lock.Lock()
					again++
					lock.Unlock()
					code, body = pay(conn, name, payment(name, 5))
				}
				report(name, int(code), body)
			}
		}()
	}
	group.Wait()
	report("again", again, "")
}

func stream(conn *grpc.ClientConn, name, method string, messages [][]byte) {
	ctx, cancel := withKey(name)
	defer cancel()
	both := grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, &both, service+method)
	if err != nil {
		report(name, int(status.Code(err)), "")
		return
	}
	for _, message := range messages {
		stream.SendMsg(&message)
	}
	stream.CloseSend()
	all := ""
	for {
		var reply []byte
		if err = stream.RecvMsg(&reply); err != nil {
			break
		}
		all += hex.EncodeToString(reply) + ";"
	}
	code := codes.OK
	if err != io.EOF {
		code = status.Code(err)
	}
	report(name, int(code), all)
}

func refusals(conn *grpc.ClientConn) {
	one(conn, "definite", "definite", payment("definite", 5))
	one(conn, "first", "reused", payment("reused", 5))
	one(conn, "reused", "reused", payment("reused", 6))
	one(conn, "missing", "", payment("missing", 5))
	var group sync.WaitGroup
	group.Add(1)
	go func() {
		defer group.Done()
		one(conn, "slow", "slow", payment("slow", 5))
	}()
	time.Sleep(200 * time.Millisecond)
	one(conn, "slow", "slow", payment("slow", 5))
	group.Wait()
	stream(conn, "watch", "Watch", [][]byte{{0x0a, 0x01, 'w'}})
	stream(conn, "pay-all", "PayAll", [][]byte{payment("stream", 5), payment("stream", 6)})
}

func main() {
	delays := backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 100 * time.Millisecond}
	conn, err := grpc.Dial(
		os.Args[1],
		grpc.WithInsecure(),
		grpc.WithNoProxy(),
		grpc.WithDefaultServiceConfig(config),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: delays, MinConnectTimeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{}), grpc.WaitForReady(true)),
	)
	if err != nil {
		panic(err)
	}
	if os.Args[2] == "refusals" {
		refusals(conn)
		return
	}
	count, err := strconv.Atoi(os.Args[3])
	if err != nil {
		panic(err)
	}
	calls(conn, count)
}
