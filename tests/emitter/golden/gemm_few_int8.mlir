// castiron emit --kernel gemm_few --shape 16x64 --codec q5_0 --tokens 2 --numerics fast --isa avx2 --threads 2
// 289 lines, sha256 5a4b371060466ffb03fe5ce74438493012d5a734e6313b094e4b3a7dc0b6d5f8
            %19:2 = scf.for %16 = %c0 to %c2 step %c1 iter_args(%17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>) {
              %20 = arith.addi %16, %c6 : index
              %21 = arith.divui %20, %c2 : index
              %22 = arith.remui %20, %c2 : index
              %23 = arith.addi %10, %21 : index
              memref.prefetch %m3[%23, %22, %c0], read, locality<3>, data : memref<1x2x352xi8>
              %24 = arith.addi %10, %21 : index
              memref.prefetch %m3[%24, %22, %c7], read, locality<3>, data : memref<1x2x352xi8>
              %25 = arith.addi %10, %21 : index
              memref.prefetch %m3[%25, %22, %c8], read, locality<3>, data : memref<1x2x352xi8>
              %26 = arith.addi %10, %21 : index
              memref.prefetch %m3[%26, %22, %c9], read, locality<3>, data : memref<1x2x352xi8>
              %27 = arith.addi %10, %21 : index
              memref.prefetch %m3[%27, %22, %c10], read, locality<3>, data : memref<1x2x352xi8>
              %28 = arith.addi %10, %21 : index
              memref.prefetch %m3[%28, %22, %c11], read, locality<3>, data : memref<1x2x352xi8>
              %29 = arith.muli %9, %c3 : index
              %30 = vector.load %m3[%10, %16, %29] : memref<1x2x352xi8>, vector<16xi8>
              %31 = vector.bitcast %30 : vector<16xi8> to vector<8xf16>
              %32 = arith.extf %31 : vector<8xf16> to vector<8xf32>
              %33 = arith.mulf %32, %c12 : vector<8xf32>
              %34 = llvm.call_intrinsic "llvm.arithmetic.fence"(%33) : (vector<8xf32>) -> vector<8xf32>
              %35 = arith.addi %14, %c1 : index
              %36 = memref.load %m2[%14, %16] : memref<2x2xi32>
              %37 = arith.muli %36, %c14 : i32
              %38 = memref.load %m2[%35, %16] : memref<2x2xi32>
              %39 = arith.muli %38, %c14 : i32
              %40 = vector.broadcast %37 : i32 to vector<8xi32>
              %41 = vector.broadcast %39 : i32 to vector<8xi32>
              %42 = arith.muli %16, %c4 : index
              %43 = arith.muli %9, %c15 : index
              %44 = arith.addi %c15, %43 : index
              %45 = vector.load %m3[%10, %16, %44] : memref<1x2x352xi8>, vector<32xi8>
              %46 = vector.bitcast %45 : vector<32xi8> to vector<8xi32>
              %47 = arith.andi %46, %c16 : vector<8xi32>
              %48 = arith.muli %9, %c15 : index
              %49 = arith.addi %c17, %48 : index
              %50 = vector.load %m3[%10, %16, %49] : memref<1x2x352xi8>, vector<32xi8>
              %51 = vector.bitcast %50 : vector<32xi8> to vector<8xi32>
              %52 = arith.shli %51, %c18 : vector<8xi32>
// 150 lines more
              %203 = arith.addi %124, %202 : vector<8xi32>
              %204 = arith.sitofp %195 : vector<8xi32> to vector<8xf32>
              %205 = arith.sitofp %203 : vector<8xi32> to vector<8xf32>
              %206 = arith.mulf %204, %32 : vector<8xf32>
              %207 = llvm.call_intrinsic "llvm.arithmetic.fence"(%206) : (vector<8xf32>) -> vector<8xf32>
              %208 = memref.load %m1[%14, %16] : memref<2x2xf32>
              %209 = vector.broadcast %208 : f32 to vector<8xf32>
              %210 = math.fma %207, %209, %17 : vector<8xf32>
              %211 = arith.mulf %205, %32 : vector<8xf32>
              %212 = llvm.call_intrinsic "llvm.arithmetic.fence"(%211) : (vector<8xf32>) -> vector<8xf32>
              %213 = memref.load %m1[%35, %16] : memref<2x2xf32>
              %214 = vector.broadcast %213 : f32 to vector<8xf32>
              %215 = math.fma %212, %214, %18 : vector<8xf32>
              scf.yield %210, %215 : vector<8xf32>, vector<8xf32>
            }
