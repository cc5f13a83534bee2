// castiron emit --kernel gemm_few --shape 16x64 --codec q4_0 --tokens 2 --isa avx2 --threads 2
// 502 lines, sha256 17db9b34e0a4f96e8b4bfc4d0f7934e41e25190f1b438a9d1d06850f45054312
            %19:2 = scf.for %16 = %c0 to %c2 step %c1 iter_args(%17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>) {
              %20 = arith.addi %16, %c6 : index
              %21 = arith.divui %20, %c2 : index
              %22 = arith.remui %20, %c2 : index
              %23 = arith.addi %10, %21 : index
              memref.prefetch %m3[%23, %22, %c0], read, locality<3>, data : memref<1x2x288xi8>
              %24 = arith.addi %10, %21 : index
              memref.prefetch %m3[%24, %22, %c7], read, locality<3>, data : memref<1x2x288xi8>
              %25 = arith.addi %10, %21 : index
              memref.prefetch %m3[%25, %22, %c8], read, locality<3>, data : memref<1x2x288xi8>
              %26 = arith.addi %10, %21 : index
              memref.prefetch %m3[%26, %22, %c9], read, locality<3>, data : memref<1x2x288xi8>
              %27 = arith.addi %10, %21 : index
              memref.prefetch %m3[%27, %22, %c10], read, locality<3>, data : memref<1x2x288xi8>
              %28 = arith.muli %9, %c3 : index
              %29 = vector.load %m3[%10, %16, %28] : memref<1x2x288xi8>, vector<16xi8>
              %30 = vector.bitcast %29 : vector<16xi8> to vector<8xf16>
              %31 = arith.extf %30 : vector<8xf16> to vector<8xf32>
              %32 = arith.mulf %31, %c11 : vector<8xf32>
              %33 = llvm.call_intrinsic "llvm.arithmetic.fence"(%32) : (vector<8xf32>) -> vector<8xf32>
              %34 = arith.addi %14, %c1 : index
              %35 = vector.broadcast %c12 : i32 to vector<8xi32>
              %36 = vector.broadcast %c12 : i32 to vector<8xi32>
              %37 = arith.muli %16, %c13 : index
              %38 = arith.muli %9, %c14 : index
              %39 = arith.addi %c14, %38 : index
              %40 = vector.load %m3[%10, %16, %39] : memref<1x2x288xi8>, vector<32xi8>
              %41 = vector.bitcast %40 : vector<32xi8> to vector<8xi32>
              %42 = arith.andi %41, %c15 : vector<8xi32>
              %43 = vector.bitcast %42 : vector<8xi32> to vector<32xi8>
              %44 = memref.load %m0[%14, %37] : memref<2x48xi32>
              %45 = vector.broadcast %44 : i32 to vector<8xi32>
              %46 = vector.bitcast %45 : vector<8xi32> to vector<32xi8>
              %47 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%43, %46) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %48 = memref.load %m0[%34, %37] : memref<2x48xi32>
              %49 = vector.broadcast %48 : i32 to vector<8xi32>
              %50 = vector.bitcast %49 : vector<8xi32> to vector<32xi8>
              %51 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%43, %50) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %52 = arith.shrui %41, %c16 : vector<8xi32>
              %53 = arith.andi %52, %c15 : vector<8xi32>
// 367 lines more
              %421 = arith.addi %420, %417 : vector<8xi32>
              %422 = arith.sitofp %419 : vector<8xi32> to vector<8xf32>
              %423 = arith.sitofp %421 : vector<8xi32> to vector<8xf32>
              %424 = arith.mulf %422, %31 : vector<8xf32>
              %425 = llvm.call_intrinsic "llvm.arithmetic.fence"(%424) : (vector<8xf32>) -> vector<8xf32>
              %426 = memref.load %m1[%14, %16] : memref<2x2xf32>
              %427 = vector.broadcast %426 : f32 to vector<8xf32>
              %428 = math.fma %425, %427, %17 : vector<8xf32>
              %429 = arith.mulf %423, %31 : vector<8xf32>
              %430 = llvm.call_intrinsic "llvm.arithmetic.fence"(%429) : (vector<8xf32>) -> vector<8xf32>
              %431 = memref.load %m1[%34, %16] : memref<2x2xf32>
              %432 = vector.broadcast %431 : f32 to vector<8xf32>
              %433 = math.fma %430, %432, %18 : vector<8xf32>
              scf.yield %428, %433 : vector<8xf32>, vector<8xf32>
            }
